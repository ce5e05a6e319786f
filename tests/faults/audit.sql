-- The store's own history: every change of a task and of a shard's term, in the transaction that makes it.
CREATE SCHEMA audit;
CREATE TABLE audit.change (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    wall bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    kind text NOT NULL,
    shard int NOT NULL,
    epoch bigint,
    task_id text,
    old jsonb,
    new jsonb
);

CREATE FUNCTION audit.row_of(t duecourse.task) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object(
        'state', t.state, 'revision', t.revision, 'round', t.round, 'attempt', t.attempt_number,
        'attempts_used', t.attempts_used, 'token', encode(t.lease_token, 'hex'), 'fencing_token', t.fencing_token,
        'epoch', t.epoch, 'run_at', t.run_at, 'due_time', t.due_time, 'outcome', t.outcome,
        'failure_reason', t.failure_reason, 'cancel_requested', t.cancel_requested
    )
$$;

-- TG_OP decides: a record that the operation lacks cannot even be named.
CREATE FUNCTION audit.task_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO audit.change (kind, shard, task_id, new)
        VALUES ('task', NEW.shard, NEW.task_id, audit.row_of(NEW));
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO audit.change (kind, shard, task_id, old)
        VALUES ('task', OLD.shard, OLD.task_id, audit.row_of(OLD));
    ELSE
        INSERT INTO audit.change (kind, shard, task_id, old, new)
        VALUES ('task', NEW.shard, NEW.task_id, audit.row_of(OLD), audit.row_of(NEW));
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION audit.term_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit.change (kind, shard, epoch) VALUES ('term', NEW.shard, NEW.epoch);
    RETURN NULL;
END
$$;

CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON duecourse.task
    FOR EACH ROW EXECUTE FUNCTION audit.task_changed();
CREATE TRIGGER audit AFTER UPDATE ON duecourse.shard
    FOR EACH ROW WHEN (OLD.epoch IS DISTINCT FROM NEW.epoch) EXECUTE FUNCTION audit.term_changed();
