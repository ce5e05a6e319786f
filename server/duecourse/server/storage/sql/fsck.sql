-- name: shards
SELECT shard, slot_from, slot_until, coordination, epoch, holder FROM duecourse.shard ORDER BY shard

-- name: beside_task
SELECT {task_columns}, t.headers, t.labels, t.content_type, NULL::bytea, t.result_type, NULL::bytea,
    t.slot, t.lane_hash,
    EXISTS (SELECT FROM duecourse.queue q WHERE q.namespace = t.namespace AND q.name = t.queue) AS has_queue,
    s.slot_from, s.slot_until, s.epoch AS shard_epoch, s.sequence_block, s.granted_until,
    a.numbers, a.fencing_tokens, a.returned,
    -- Asked for in the words of the due index, and of no other: what it lacks is not found.
    (
        SELECT count(*) FROM duecourse.task i
        WHERE i.shard = t.shard AND (i.due_time / 10000000)::int = (t.due_time / 10000000)::int
            AND i.lane_hash = t.lane_hash AND i.due_time = t.due_time AND i.sequence = t.sequence
            AND i.due_time IS NOT NULL
    ) > 0 AS is_in_due_index
FROM wanted w
JOIN duecourse.task t ON t.namespace = w.namespace AND t.task_id = w.task_id
LEFT JOIN duecourse.shard s ON s.shard = t.shard
LEFT JOIN LATERAL (
    SELECT array_agg(k.number ORDER BY k.number) AS numbers,
        array_agg(k.fencing_token ORDER BY k.number) AS fencing_tokens,
        array_agg(k.number ORDER BY k.number) FILTER (WHERE k.outcome = 'returned') AS returned
    FROM duecourse.attempt k
    WHERE k.namespace = t.namespace AND k.task_id = t.task_id
) a ON true
ORDER BY t.namespace, t.task_id

-- name: next_tasks
WITH wanted AS MATERIALIZED (
    SELECT namespace, task_id FROM duecourse.task
    WHERE (namespace, task_id) > ($1, $2)
    ORDER BY namespace, task_id
    LIMIT $3
)
{beside_task}

-- name: these_tasks
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[]) AS w (namespace, task_id)
)
{beside_task}

-- name: beside_attempt
SELECT {attempt_columns}, a.namespace, a.task_id, t.shard, s.epoch AS shard_epoch
FROM wanted w
JOIN duecourse.attempt a ON a.namespace = w.namespace AND a.task_id = w.task_id AND a.number = w.number
LEFT JOIN duecourse.task t ON t.namespace = a.namespace AND t.task_id = a.task_id
LEFT JOIN duecourse.shard s ON s.shard = t.shard
ORDER BY a.namespace, a.task_id, a.number

-- name: next_attempts
WITH wanted AS MATERIALIZED (
    SELECT namespace, task_id, number FROM duecourse.attempt
    WHERE (namespace, task_id, number) > ($1, $2, $3)
    ORDER BY namespace, task_id, number
    LIMIT $4
)
{beside_attempt}

-- name: these_attempts
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::int[]) AS w (namespace, task_id, number)
)
{beside_attempt}
