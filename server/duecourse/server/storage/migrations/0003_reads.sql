-- min-node-version: 1

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
-- within their lane, and `head + 1` tells that there are more. Lanes are found by skipping through the due index.
CREATE FUNCTION duecourse.bucket_rows(of_shard int, due_from bigint, due_before bigint, head int)
RETURNS TABLE (row_id tid, place bigint)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET work_mem = '64MB'
AS $$
BEGIN
    RETURN QUERY
        WITH RECURSIVE lane (bucket, lane_hash) AS (
            (
                SELECT (t.due_time / 10000000)::int, t.lane_hash FROM duecourse.task t
                WHERE t.shard = of_shard AND t.due_time IS NOT NULL
                    AND (t.due_time / 10000000)::int >= due_from / 10000000
                    AND (t.due_time / 10000000)::int <= (due_before - 1) / 10000000
                ORDER BY t.shard, (t.due_time / 10000000)::int, t.lane_hash LIMIT 1
            )
            UNION ALL
            SELECT next.bucket, next.lane_hash FROM lane CROSS JOIN LATERAL (
                SELECT (t.due_time / 10000000)::int AS bucket, t.lane_hash FROM duecourse.task t
                WHERE t.shard = of_shard AND t.due_time IS NOT NULL
                    AND ((t.due_time / 10000000)::int, t.lane_hash) > (lane.bucket, lane.lane_hash)
                    AND (t.due_time / 10000000)::int <= (due_before - 1) / 10000000
                ORDER BY t.shard, (t.due_time / 10000000)::int, t.lane_hash LIMIT 1
            ) next
        ), counted AS (
            SELECT first.row_id, row_number() OVER (
                PARTITION BY lane.lane_hash ORDER BY first.due_time, first.sequence
            ) AS place
            FROM lane CROSS JOIN LATERAL (
                SELECT t.ctid AS row_id, t.due_time, t.sequence FROM duecourse.task t
                WHERE t.shard = of_shard AND (t.due_time / 10000000)::int = lane.bucket AND t.due_time IS NOT NULL
                    AND t.lane_hash = lane.lane_hash AND t.due_time >= due_from AND t.due_time < due_before
                    AND t.state IN ('pending', 'retry_wait')
                ORDER BY t.due_time, t.sequence LIMIT head + 1
            ) first
        )
        SELECT c.row_id, c.place FROM counted c WHERE c.place <= head + 1;
END
$$;
