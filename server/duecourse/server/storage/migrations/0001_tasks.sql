-- min-node-version: 1

-- A range of slots and the term that may write them. A write locks its row FOR SHARE and compares epoch and holder; a
-- raise updates it, and now and then a grant.
CREATE TABLE duecourse.shard (
    shard int PRIMARY KEY,
    slot_from int NOT NULL,
    slot_until int NOT NULL,
    -- Whose elections lead it: '' never led, 'solo', or the random id of a cluster.
    coordination text COLLATE "C" NOT NULL DEFAULT '',
    epoch bigint NOT NULL DEFAULT 0,
    holder bytea NOT NULL DEFAULT '',
    -- The term issues sequences from sequence_block * 2^32 on.
    sequence_block bigint NOT NULL DEFAULT 0,
    -- When the last 16 raises were made, oldest first, in cluster time.
    raises bigint[] NOT NULL DEFAULT '{}',
    -- No task due later has ever been granted: whoever looks for held tasks need not look among the millions that are
    -- far from due. Moved ten minutes ahead at a time.
    granted_until bigint NOT NULL DEFAULT 0,
    CHECK (slot_from < slot_until)
);

-- A queue comes into being with its first task.
CREATE TABLE duecourse.queue (
    namespace text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    settings jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (namespace, name)
);

-- Times are microseconds since 1970 UTC in cluster time. What never changes stands first, what changes last: the log
-- then carries only the tail of a row that was updated in its page.
CREATE TABLE duecourse.task (
    lane_hash bigint NOT NULL,
    sequence bigint NOT NULL,
    run_at bigint NOT NULL,
    create_time bigint NOT NULL,
    shard int NOT NULL,
    slot smallint NOT NULL,
    priority smallint NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    task_type text COLLATE "C" NOT NULL,
    fairness_key text COLLATE "C" NOT NULL,
    uid bytea NOT NULL,
    fingerprint bytea NOT NULL,
    -- duecourse.storage.v1.Policy; empty: the defaults.
    policy bytea NOT NULL,
    -- duecourse.storage.v1.Strings; empty: none.
    headers bytea NOT NULL,
    labels jsonb,
    content_type bytea NOT NULL,
    payload bytea NOT NULL,

    state text COLLATE "C" NOT NULL,
    -- When it is next eligible; NULL once it has ended.
    due_time bigint,
    revision int NOT NULL,
    round int NOT NULL,
    attempt_count int NOT NULL,
    attempts_used int NOT NULL,
    returns_in_row int NOT NULL,
    cancel_requested boolean NOT NULL,
    earlier_attempt_may_run boolean NOT NULL,
    -- The latest attempt; lease_token is NULL before the first.
    attempt_round int,
    attempt_number int,
    epoch bigint,
    fencing_token bigint,
    lease_time bigint,
    sign_of_life bigint,
    start_time bigint,
    attempt_end_time bigint,
    lease_token bytea,
    worker text COLLATE "C",
    incarnation text COLLATE "C",
    node text COLLATE "C",
    outcome text COLLATE "C",
    failure_type bytea,
    failure_message bytea,
    outcome_digest bytea,
    -- What the handler said of how far it has come; NULL: nothing.
    progress bytea,
    end_time bigint,
    failure_reason text COLLATE "C",
    -- duecourse.storage.v1.Answers; empty: none.
    answers bytea NOT NULL,
    result_type bytea,
    result bytea,

    PRIMARY KEY (namespace, task_id),
    CHECK (state IN ('pending', 'leased', 'running', 'retry_wait', 'succeeded', 'failed', 'cancelled'))
) WITH (
    fillfactor = 50,
    -- A busy table turns over in minutes: by shares of the whole, a large backlog would keep its dead rows for hours.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 1
);

-- The due index: a bucket of a shard is one range of it, and so is a lane in the bucket. A grant changes nothing here.
CREATE INDEX task_due ON duecourse.task
    (shard, ((due_time / 10000000)::int), lane_hash, due_time, sequence) WHERE due_time IS NOT NULL;

CREATE INDEX task_ended ON duecourse.task (shard, end_time) WHERE end_time IS NOT NULL;

-- Attempts that have ended and that their task's row no longer holds.
CREATE TABLE duecourse.attempt (
    namespace text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    number int NOT NULL,
    round int NOT NULL,
    epoch bigint NOT NULL,
    fencing_token bigint NOT NULL,
    lease_time bigint NOT NULL,
    sign_of_life bigint NOT NULL,
    start_time bigint,
    end_time bigint,
    lease_token bytea NOT NULL,
    worker text COLLATE "C" NOT NULL,
    incarnation text COLLATE "C" NOT NULL,
    node text COLLATE "C" NOT NULL,
    outcome text COLLATE "C",
    failure_type bytea,
    failure_message bytea,
    outcome_digest bytea,
    progress bytea,
    PRIMARY KEY (namespace, task_id, number)
);
