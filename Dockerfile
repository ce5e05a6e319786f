# One image for everything: `docker run IMAGE server`, `… store migrate`, `… worker module:attribute`, `… task list`.
FROM python:3.13-slim AS build
WORKDIR /source
COPY . .
RUN python -m venv /opt/duecourse && /opt/duecourse/bin/pip install --no-cache-dir '.[server,fast]'

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home duecourse
COPY --from=build /opt/duecourse /opt/duecourse
ENV PATH=/opt/duecourse/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    DUECOURSE_API_LISTEN=0.0.0.0:7400 \
    DUECOURSE_ADMIN_LISTEN=0.0.0.0:7402
USER 10001
EXPOSE 7400 7402
# SIGTERM drains; give it longer than DUECOURSE_DRAIN (25s) before a kill.
STOPSIGNAL SIGTERM
ENTRYPOINT ["duecourse"]
CMD ["server"]
