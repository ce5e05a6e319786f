-- name: task_columns
t.namespace, t.task_id, t.shard, t.queue, t.task_type, t.priority, t.fairness_key, t.uid, t.sequence, t.run_at,
t.create_time, t.policy, t.state, t.due_time, t.revision, t.round, t.attempt_count, t.attempts_used, t.returns_in_row,
t.cancel_requested, t.earlier_attempt_may_run, t.end_time, t.failure_reason, t.answers, t.lease_token,
t.attempt_number, t.attempt_round, t.worker, t.incarnation, t.node, t.epoch, t.fencing_token, t.lease_time,
t.sign_of_life, t.start_time, t.attempt_end_time, t.outcome, t.failure_type, t.failure_message, t.outcome_digest,
t.progress

-- name: attempt_columns
a.lease_token, a.number, a.round, a.worker, a.incarnation, a.node, a.epoch, a.fencing_token, a.lease_time,
a.sign_of_life, a.start_time, a.end_time, a.outcome, a.failure_type, a.failure_message, a.outcome_digest, a.progress

-- name: durability
SELECT current_setting('synchronous_commit'), current_setting('fsync') = 'on',
    (SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'async')

-- name: shards
SELECT shard, slot_from, slot_until, coordination, epoch, holder FROM duecourse.shard ORDER BY shard

-- name: read_clock
SELECT duecourse.reference_time(), accepted, accepted_by, confirmed, confirmed_by, wall_clock_offset FROM duecourse.clock

-- name: load_held
SELECT {task_columns}
FROM duecourse.held_rows($1::int[]) AS r (row_id)
JOIN duecourse.task t ON t.ctid = r.row_id

-- name: load_buckets
SELECT {task_columns}, t.lane_hash, s.shard, r.at_bucket, r.at_lane
FROM unnest($1::int[], $2::int[], $3::bigint[]) AS s (shard, after_bucket, after_lane)
CROSS JOIN LATERAL duecourse.bucket_rows(
    s.shard, $4::bigint, $5::bigint, $6::int, s.after_bucket, s.after_lane, $7::int
) r
LEFT JOIN duecourse.task t ON t.ctid = r.row_id
ORDER BY r.place

-- name: load_lanes
SELECT {task_columns}, l.number::int
FROM unnest(
    $1::int[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::int[], $7::text[], $8::bigint[], $9::bigint[],
    $10::bigint[], $11::int[]
) WITH ORDINALITY AS l (
    shard, lane_hash, namespace, queue, task_type, priority, fairness_key, after_due_time, after_sequence, due_before,
    at_most, number
)
CROSS JOIN LATERAL duecourse.lane_rows(
    l.shard, l.lane_hash, l.namespace, l.queue, l.task_type, l.priority, l.fairness_key, l.after_due_time,
    l.after_sequence, l.due_before, l.at_most
) AS r (row_id)
JOIN duecourse.task t ON t.ctid = r.row_id
ORDER BY l.number, t.due_time, t.sequence

-- name: load_tasks
SELECT {task_columns}
FROM unnest($1::text[], $2::text[]) AS k (namespace, task_id)
JOIN duecourse.task t ON t.namespace = k.namespace AND t.task_id = k.task_id

-- name: load_oldest_due
SELECT {task_columns}
FROM unnest($1::int[]) AS s (shard)
CROSS JOIN LATERAL duecourse.oldest_rows(s.shard, $2::bigint, $3::int) AS r (row_id)
JOIN duecourse.task t ON t.ctid = r.row_id
ORDER BY t.shard, t.due_time, t.sequence

-- name: find_attempts
SELECT w.place::int, t.lease_token, t.attempt_number, t.attempt_round, t.worker, t.incarnation, t.node, t.epoch,
    t.fencing_token, t.lease_time, t.sign_of_life, t.start_time, t.attempt_end_time, t.outcome, t.failure_type,
    t.failure_message, t.outcome_digest, t.progress
FROM unnest($1::text[], $2::text[], $3::bytea[]) WITH ORDINALITY AS w (namespace, task_id, lease_token, place)
JOIN duecourse.task t ON t.namespace = w.namespace AND t.task_id = w.task_id AND t.lease_token = w.lease_token
UNION ALL
SELECT w.place::int, {attempt_columns}
FROM unnest($1::text[], $2::text[], $3::bytea[]) WITH ORDINALITY AS w (namespace, task_id, lease_token, place)
JOIN duecourse.attempt a ON a.namespace = w.namespace AND a.task_id = w.task_id AND a.lease_token = w.lease_token

-- name: read_task
SELECT {task_columns}, t.headers, t.labels, t.content_type,
    CASE WHEN $3::boolean THEN t.payload END, CASE WHEN $3 THEN t.result_type END, CASE WHEN $3 THEN t.result END
FROM duecourse.task t
WHERE t.namespace = $1 AND t.task_id = $2

-- name: read_attempts
SELECT {attempt_columns}
FROM duecourse.attempt a
WHERE a.namespace = $1 AND a.task_id = $2
ORDER BY a.number

-- name: list_tasks
WITH scanned AS MATERIALIZED (
    SELECT t.ctid AS row_id, t.task_id, t.queue, t.state, t.run_at
    FROM duecourse.task t
    WHERE t.namespace = $1 AND t.task_id > $2
    ORDER BY t.task_id
    LIMIT $8
), bound AS (
    SELECT max(task_id) AS last_scanned, count(*)::int AS scanned FROM scanned
), matching AS (
    SELECT row_id FROM scanned
    WHERE ($3::text IS NULL OR queue = $3) AND (cardinality($4::text[]) = 0 OR state = ANY ($4))
        AND ($5::bigint IS NULL OR run_at >= $5) AND ($6::bigint IS NULL OR run_at < $6)
    ORDER BY task_id
    LIMIT $7
)
SELECT {task_columns}, t.headers, t.labels, t.content_type, b.last_scanned, b.scanned
FROM bound b
LEFT JOIN matching m ON true
LEFT JOIN duecourse.task t ON t.ctid = m.row_id
ORDER BY t.task_id
