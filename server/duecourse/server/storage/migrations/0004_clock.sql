-- min-node-version: 3

-- What time it is, in microseconds since 1970 UTC: the reference of the cluster clock. In a place of its own, so that
-- a test can have it off.
CREATE FUNCTION duecourse.reference_time() RETURNS bigint
LANGUAGE sql VOLATILE
BEGIN ATOMIC
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
END;

-- What the nodes know of the reference, in its own time; 0: never.
CREATE TABLE duecourse.clock (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- When a step of it was last accepted, and by whom.
    accepted bigint NOT NULL DEFAULT 0,
    accepted_by text COLLATE "C" NOT NULL DEFAULT '',
    -- When a node that follows it last found it as it should be, which node, and how far that one's wall clock was off.
    confirmed bigint NOT NULL DEFAULT 0,
    confirmed_by text COLLATE "C" NOT NULL DEFAULT '',
    wall_clock_offset bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 10);

INSERT INTO duecourse.clock DEFAULT VALUES;

-- Accept the reference, if it is near an instant; NULL: wherever it is. Returns what it showed; NULL: not accepted.
CREATE FUNCTION duecourse.accept_clock(near bigint, tolerance bigint, by text, with_offset bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    shown bigint;
BEGIN
    PERFORM 1 FROM duecourse.clock FOR UPDATE;
    shown := duecourse.reference_time();
    IF near IS NOT NULL AND abs(shown - near) > tolerance THEN
        RETURN NULL;
    END IF;
    UPDATE duecourse.clock SET
        accepted = shown, accepted_by = by, confirmed = shown, confirmed_by = by, wall_clock_offset = with_offset;
    RETURN shown;
END;
$$;

-- Confirm the reference, if it is near an instant and nobody else has done so lately.
CREATE FUNCTION duecourse.confirm_clock(
    near bigint, tolerance bigint, by text, with_offset bigint, not_within bigint
) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    shown bigint := duecourse.reference_time();
BEGIN
    UPDATE duecourse.clock SET confirmed = shown, confirmed_by = by, wall_clock_offset = with_offset
    WHERE abs(shown - near) <= tolerance AND abs(shown - confirmed) >= not_within;
    RETURN FOUND;
END;
$$;
