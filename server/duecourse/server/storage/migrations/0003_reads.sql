-- min-node-version: 1

-- What is leased or running: looks at all tasks that may ever have been granted and have not ended.
CREATE FUNCTION duecourse.held_rows(of_shards int[]) RETURNS SETOF tid
LANGUAGE sql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
BEGIN ATOMIC
    SELECT t.ctid
    FROM duecourse.shard s
    JOIN duecourse.task t ON t.shard = s.shard
    WHERE s.shard = ANY (of_shards) AND t.due_time IS NOT NULL
        AND (t.due_time / 10000000)::int <= (s.granted_until / 10000000)::int
        AND t.state IN ('leased', 'running');
END;

-- The next waiting tasks of one lane, in order: rows of its shard due before an instant that come after a key. Goes
-- from bucket to bucket by the due index, past other lanes' rows without reading them.
CREATE FUNCTION duecourse.lane_rows(
    of_shard int, of_lane_hash bigint, of_namespace text, of_queue text, of_task_type text, of_priority int,
    of_fairness_key text, after_due_time bigint, after_sequence bigint, due_before bigint, at_most int
) RETURNS SETOF tid
LANGUAGE plpgsql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $$
DECLARE
    in_bucket int := after_due_time / 10000000;
    remaining bigint := at_most;
    found_now bigint;
BEGIN
    WHILE in_bucket IS NOT NULL AND remaining > 0 LOOP
        RETURN QUERY
            SELECT t.ctid FROM duecourse.task t
            WHERE t.shard = of_shard AND (t.due_time / 10000000)::int = in_bucket AND t.lane_hash = of_lane_hash
                AND t.due_time IS NOT NULL AND (t.due_time, t.sequence) > (after_due_time, after_sequence)
                AND t.due_time < due_before AND t.state IN ('pending', 'retry_wait')
                AND t.namespace = of_namespace AND t.queue = of_queue AND t.task_type = of_task_type
                AND t.priority = of_priority AND t.fairness_key = of_fairness_key
            ORDER BY t.due_time, t.sequence LIMIT remaining;
        GET DIAGNOSTICS found_now = ROW_COUNT;
        remaining := remaining - found_now;
        IF remaining > 0 THEN
            -- The first bucket that may hold more of the lane: no bucket is left out, and none is looked at twice.
            SELECT (t.due_time / 10000000)::int INTO in_bucket FROM duecourse.task t
            WHERE t.shard = of_shard AND t.due_time IS NOT NULL
                AND ((t.due_time / 10000000)::int, t.lane_hash) >= (in_bucket + 1, of_lane_hash)
                AND (t.due_time / 10000000)::int <= (due_before - 1) / 10000000
            ORDER BY t.shard, (t.due_time / 10000000)::int, t.lane_hash LIMIT 1;
        END IF;
    END LOOP;
END
$$;

-- The oldest waiting tasks of a shard due before an instant: bucket by bucket, the first rows of each lane in it.
CREATE FUNCTION duecourse.oldest_rows(of_shard int, due_before bigint, at_most int) RETURNS SETOF tid
LANGUAGE plpgsql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    in_bucket int := -2147483648;
    remaining bigint := at_most;
    found_now bigint;
BEGIN
    LOOP
        SELECT (t.due_time / 10000000)::int INTO in_bucket FROM duecourse.task t
        WHERE t.shard = of_shard AND t.due_time IS NOT NULL AND (t.due_time / 10000000)::int > in_bucket
        ORDER BY t.shard, (t.due_time / 10000000)::int LIMIT 1;
        EXIT WHEN NOT FOUND OR remaining <= 0 OR in_bucket > (due_before - 1) / 10000000;
        RETURN QUERY
            WITH RECURSIVE lane (lane_hash) AS (
                (
                    SELECT t.lane_hash FROM duecourse.task t
                    WHERE t.shard = of_shard AND (t.due_time / 10000000)::int = in_bucket AND t.due_time IS NOT NULL
                    ORDER BY t.lane_hash LIMIT 1
                )
                UNION ALL
                SELECT next.lane_hash FROM lane CROSS JOIN LATERAL (
                    SELECT t.lane_hash FROM duecourse.task t
                    WHERE t.shard = of_shard AND (t.due_time / 10000000)::int = in_bucket AND t.due_time IS NOT NULL
                        AND t.lane_hash > lane.lane_hash
                    ORDER BY t.lane_hash LIMIT 1
                ) next
            )
            SELECT head.place FROM lane CROSS JOIN LATERAL (
                SELECT t.ctid AS place, t.due_time, t.sequence FROM duecourse.task t
                WHERE t.shard = of_shard AND (t.due_time / 10000000)::int = in_bucket AND t.lane_hash = lane.lane_hash
                    AND t.due_time IS NOT NULL AND t.due_time < due_before AND t.state IN ('pending', 'retry_wait')
                ORDER BY t.due_time, t.sequence LIMIT remaining
            ) head
            ORDER BY head.due_time, head.sequence LIMIT remaining;
        GET DIAGNOSTICS found_now = ROW_COUNT;
        remaining := remaining - found_now;
    END LOOP;
END
$$;

-- The first waiting tasks of every lane of a shard due in a range, each lane cut after `head` rows; `place` counts them
-- within their lane, in order, and `head + 1` tells that there are more.
--
-- It goes through the due index from lane to lane, and skips the rest of a lane in a bucket once it has read its first
-- rows there. A lane that is full by then is passed over in all later buckets: short stretches of it by reading on in
-- the index alone, long ones by a skip. So neither a lane with a million rows nor a backlog of days costs much.
--
-- It begins after a lane in a bucket, and stops after about `at_most` rows or steps; then the last row has no row_id
-- and says after which lane in which bucket to go on. Each call counts places from 1.
CREATE FUNCTION duecourse.bucket_rows(
    of_shard int, due_from bigint, due_before bigint, head int, after_bucket int, after_lane bigint, at_most int
) RETURNS TABLE (row_id tid, place bigint, at_bucket int, at_lane bigint)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $$
DECLARE
    stretch CONSTANT int := 256;
    last_bucket CONSTANT int := (due_before - 1) / 10000000;
    remaining bigint := at_most;
    is_wanted boolean;
    lanes bigint[] := '{}';
    counts bigint[] := '{}';
    filled bigint[] := '{}';
    lane int;
    found_now bigint;
BEGIN
    at_bucket := after_bucket;
    at_lane := after_lane;
    WHILE remaining > 0 LOOP
        -- The next row of a lane that is not full, or the end of a stretch without one.
        SELECT near.bucket, near.lane_hash, near.is_wanted INTO at_bucket, at_lane, is_wanted
        FROM (
            SELECT entry.bucket, entry.lane_hash, entry.lane_hash <> ALL (filled) AS is_wanted,
                row_number() OVER () AS number
            FROM (
                SELECT (t.due_time / 10000000)::int AS bucket, t.lane_hash FROM duecourse.task t
                WHERE t.shard = of_shard AND t.due_time IS NOT NULL
                    AND ((t.due_time / 10000000)::int, t.lane_hash) > (at_bucket, at_lane)
                    AND (t.due_time / 10000000)::int <= last_bucket
                ORDER BY t.shard, (t.due_time / 10000000)::int, t.lane_hash LIMIT stretch
            ) entry
        ) near
        WHERE near.is_wanted OR near.number = stretch LIMIT 1;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        remaining := remaining - 1;
        CONTINUE WHEN NOT is_wanted;
        lane := array_position(lanes, at_lane);
        IF lane IS NULL THEN
            lanes := lanes || at_lane;
            counts := counts || 0::bigint;
            lane := cardinality(lanes);
        END IF;
        RETURN QUERY
            SELECT first.row_id, counts[lane] + row_number() OVER (), NULL::int, NULL::bigint FROM (
                SELECT t.ctid AS row_id FROM duecourse.task t
                WHERE t.shard = of_shard AND (t.due_time / 10000000)::int = at_bucket AND t.lane_hash = at_lane
                    AND t.due_time IS NOT NULL AND t.due_time >= due_from AND t.due_time < due_before
                    AND t.state IN ('pending', 'retry_wait')
                ORDER BY t.due_time, t.sequence LIMIT head + 1 - counts[lane]
            ) first;
        GET DIAGNOSTICS found_now = ROW_COUNT;
        remaining := remaining - found_now;
        counts[lane] := counts[lane] + found_now;
        IF counts[lane] > head THEN
            filled := filled || at_lane;
        END IF;
    END LOOP;
    row_id := NULL;
    place := head + 2;
    RETURN NEXT;
END
$$;
