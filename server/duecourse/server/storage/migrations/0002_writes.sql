-- min-node-version: 1

-- One commit: all writes of several shards, each shard under its fence, in one call. f_ fences (by shard), q_ queues
-- that may be new (by name), i_ new tasks, g_ grants, s_ plain successes, u_ all other updates, a_ ended attempts to be
-- kept, `a_of` saying of which update: grants are counted first, then successes, then the others, from 1.
--
-- What an array costs its sender decides its shape. Names come joined by the separator, which no name contains; should
-- one contain it after all, its column grows longer than the others, and what they lack is NULL and refused. A column
-- that is the same default throughout comes empty; those that are filled up from their first value below may come as
-- that value alone. Kinds of writes that there are none of are left out. Tokens, ids and digests come as one string of
-- bytes, each as long as the others. A new task's shard and slot come as one number, shard * 16,384 + slot.
--
-- First the shard rows are locked, in order; if one holds another term nothing is written, and only those are returned:
-- kind 0, place the shard, number its epoch, first its holder. Otherwise
-- kind 1, the id of new task `place` was taken: first the uid, second the fingerprint that stand there;
-- kind 2, the revision did not match at update `place`;
-- kind 3, grant `place` was applied: first the payload, second its content type, third the headers.
CREATE FUNCTION duecourse.commit_writes(
    f_shard int[], f_epoch bigint[], f_holder bytea[],
    q_namespace text[] = '{}', q_name text[] = '{}',
    i_place int[] = '{}', i_namespace text = '', i_task_id text = '', i_queue text = '',
    i_task_type text = '', i_priority smallint[] = '{}', i_fairness_key text = '', i_lane_hash bigint[] = '{}',
    i_uid bytea = '', i_sequence bigint[] = '{}', i_run_at bigint[] = '{}', i_create_time bigint[] = '{}',
    i_policy bytea[] = '{}', i_headers bytea[] = '{}', i_labels jsonb[] = '{}', i_content_type bytea[] = '{}',
    i_payload bytea[] = '{}', i_fingerprint bytea = '',
    grants int = 0, g_namespace text = '', g_task_id text = '', g_revision int[] = '{}', g_round int[] = '{}', g_number int[] = '{}',
    g_attempts_used int[] = '{}', g_lease_token bytea = '', g_worker text = '', g_incarnation text = '',
    g_node text = '', g_epoch bigint[] = '{}', g_fencing_token bigint[] = '{}', g_lease_time bigint[] = '{}',
    g_latest_due_time bigint = 0,
    successes int = 0, s_namespace text = '', s_task_id text = '', s_revision int[] = '{}', s_start_time bigint[] = '{}',
    s_end_time bigint[] = '{}', s_outcome_digest bytea[] = '{}', s_result_type bytea[] = '{}', s_result bytea[] = '{}',
    u_namespace text = '', u_task_id text = '', u_state text[] = '{}', u_due_time bigint[] = '{}',
    u_revision int[] = '{}', u_round int[] = '{}', u_attempt_count int[] = '{}', u_attempts_used int[] = '{}',
    u_returns_in_row int[] = '{}', u_cancel_requested boolean[] = '{}', u_earlier_attempt_may_run boolean[] = '{}',
    u_epoch bigint[] = '{}', u_sign_of_life bigint[] = '{}', u_start_time bigint[] = '{}',
    u_attempt_end_time bigint[] = '{}', u_outcome text[] = '{}', u_failure_type bytea[] = '{}',
    u_failure_message bytea[] = '{}', u_outcome_digest bytea[] = '{}', u_progress bytea[] = '{}',
    u_end_time bigint[] = '{}', u_failure_reason text[] = '{}', u_answers bytea[] = '{}', u_result_type bytea[] = '{}',
    u_result bytea[] = '{}',
    a_of int[] = '{}', a_namespace text = '', a_task_id text = '', a_number int[] = '{}', a_round int[] = '{}',
    a_epoch bigint[] = '{}', a_fencing_token bigint[] = '{}', a_lease_time bigint[] = '{}',
    a_sign_of_life bigint[] = '{}', a_start_time bigint[] = '{}', a_end_time bigint[] = '{}',
    a_lease_token bytea[] = '{}', a_worker text[] = '{}', a_incarnation text[] = '{}', a_node text[] = '{}',
    a_outcome text[] = '{}', a_failure_type bytea[] = '{}', a_failure_message bytea[] = '{}',
    a_outcome_digest bytea[] = '{}', a_progress bytea[] = '{}',
    returned_kept int = 0
) RETURNS TABLE (kind int, place int, number bigint, first bytea, second bytea, third bytea)
LANGUAGE plpgsql
-- Every join here is a look-up of the rows that were named; a plan made while the table was small must stay one.
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    inserts CONSTANT int := cardinality(i_place);
    uid_bytes CONSTANT int := octet_length(i_uid) / greatest(inserts, 1);
    fingerprint_bytes CONSTANT int := octet_length(i_fingerprint) / greatest(inserts, 1);
    token_bytes CONSTANT int := octet_length(g_lease_token) / greatest(grants, 1);
    done int;
    granted_until bigint;
    taken int[] := '{}';
    newly_taken int[];
    newly_uids bytea[];
    newly_fingerprints bytea[];
    mismatched int[] := '{}';
    separator CONSTANT text := E'\x1f';
BEGIN
    SELECT count(*), min(locked.granted_until) INTO done, granted_until
    FROM (
        SELECT s.epoch = f.epoch AND s.holder = f.holder AS is_current, s.granted_until
        FROM unnest(f_shard, f_epoch, f_holder) AS f (shard, epoch, holder)
        JOIN duecourse.shard s ON s.shard = f.shard
        ORDER BY s.shard
        FOR SHARE OF s
    ) locked
    WHERE is_current;
    IF done < cardinality(f_shard) THEN
        RETURN QUERY
            SELECT 0, f.shard, coalesce(s.epoch, 0), coalesce(s.holder, ''), NULL::bytea, NULL::bytea
            FROM unnest(f_shard, f_epoch, f_holder) AS f (shard, epoch, holder)
            LEFT JOIN duecourse.shard s ON s.shard = f.shard
            WHERE s.epoch IS DISTINCT FROM f.epoch OR s.holder IS DISTINCT FROM f.holder;
        RETURN;
    END IF;

    IF grants > 0 AND granted_until < g_latest_due_time THEN
        UPDATE duecourse.shard s SET granted_until = g_latest_due_time + 600000000
        WHERE s.shard = ANY (f_shard) AND s.granted_until < g_latest_due_time;
    END IF;

    IF cardinality(q_name) > 0 THEN
        INSERT INTO duecourse.queue (namespace, name) SELECT * FROM unnest(q_namespace, q_name) ON CONFLICT DO NOTHING;
    END IF;

    -- Plain inserts cost a fifth less than ON CONFLICT; only where an id is taken they are made again without it.
    WHILE inserts > 0 LOOP
        BEGIN
            INSERT INTO duecourse.task (
                shard, slot, namespace, task_id, queue, task_type, priority, fairness_key, lane_hash, uid, sequence,
                run_at, create_time, policy, headers, labels, content_type, payload, fingerprint,
                state, due_time, revision, round, attempt_count, attempts_used, returns_in_row, cancel_requested,
                earlier_attempt_may_run, answers
            )
            SELECT i.task_place >> 14, i.task_place & 16383, coalesce(i.namespace, i_namespace), i.task_id, coalesce(i.queue, i_queue),
                coalesce(i.task_type, i_task_type), coalesce(i.priority, i_priority[1], 0), coalesce(i.fairness_key, i_fairness_key),
                coalesce(i.lane_hash, i_lane_hash[1]),
                substr(i_uid, (i.place::int - 1) * uid_bytes + 1, uid_bytes), i.sequence, i.run_at,
                coalesce(i.create_time, i_create_time[1]), coalesce(i.policy, ''), coalesce(i.headers, ''), i.labels,
                coalesce(i.content_type, i_content_type[1]), i.payload,
                substr(i_fingerprint, (i.place::int - 1) * fingerprint_bytes + 1, fingerprint_bytes),
                'pending', i.run_at, 1, 1, 0, 0, 0, false, false, ''
            FROM unnest(
                i_place, string_to_array(i_namespace, separator), string_to_array(i_task_id, separator),
                string_to_array(i_queue, separator), string_to_array(i_task_type, separator), i_priority,
                string_to_array(i_fairness_key, separator), i_lane_hash, i_sequence, i_run_at, i_create_time,
                i_policy, i_headers, i_labels, i_content_type, i_payload
            ) WITH ORDINALITY AS i (
                task_place, namespace, task_id, queue, task_type, priority, fairness_key, lane_hash, sequence,
                run_at, create_time, policy, headers, labels, content_type, payload, place
            )
            WHERE i.place <> ALL (taken);
            EXIT;
        EXCEPTION WHEN unique_violation THEN
            SELECT array_agg(i.place::int), array_agg(t.uid), array_agg(t.fingerprint)
            INTO newly_taken, newly_uids, newly_fingerprints
            FROM unnest(string_to_array(i_namespace, separator), string_to_array(i_task_id, separator))
                WITH ORDINALITY AS i (namespace, task_id, place)
            JOIN duecourse.task t ON t.namespace = coalesce(i.namespace, i_namespace) AND t.task_id = i.task_id
            WHERE i.place <> ALL (taken);
            IF newly_taken IS NULL THEN
                RAISE EXCEPTION 'a taken id became free meanwhile' USING ERRCODE = 'serialization_failure';
            END IF;
            taken := taken || newly_taken;
            RETURN QUERY
                SELECT 1, n.place, 0::bigint, n.uid, n.fingerprint, NULL::bytea
                FROM unnest(newly_taken, newly_uids, newly_fingerprints) AS n (place, uid, fingerprint);
        END;
    END LOOP;

    IF grants > 0 THEN
        RETURN QUERY
            WITH granted AS (
                UPDATE duecourse.task t SET
                    state = 'leased', revision = t.revision + 1, attempt_count = coalesce(g.number, g_number[1]),
                    attempts_used = coalesce(g.attempts_used, g.number, g_number[1]),
                    attempt_round = coalesce(g.round, 1), attempt_number = coalesce(g.number, g_number[1]), epoch = coalesce(g.epoch, g_epoch[1]),
                    fencing_token = coalesce(g.fencing_token, g.lease_time, g_lease_time[1]),
                    lease_time = coalesce(g.lease_time, g_lease_time[1]),
                    sign_of_life = coalesce(g.lease_time, g_lease_time[1]), start_time = NULL, attempt_end_time = NULL,
                    lease_token = substr(g_lease_token, (g.place::int - 1) * token_bytes + 1, token_bytes),
                    worker = coalesce(g.worker, g_worker),
                    incarnation = coalesce(g.incarnation, g_incarnation), node = coalesce(g.node, g_node),
                    outcome = NULL, failure_type = NULL, failure_message = NULL, outcome_digest = NULL, progress = NULL
                FROM unnest(
                    string_to_array(g_namespace, separator), string_to_array(g_task_id, separator), g_revision,
                    g_round, g_number, g_attempts_used, string_to_array(g_worker, separator),
                    string_to_array(g_incarnation, separator), string_to_array(g_node, separator), g_epoch,
                    g_fencing_token, g_lease_time
                ) WITH ORDINALITY AS g (
                    namespace, task_id, revision, round, number, attempts_used, worker, incarnation, node, epoch, fencing_token, lease_time, place
                )
                WHERE t.namespace = coalesce(g.namespace, g_namespace) AND t.task_id = g.task_id
                    AND t.revision = coalesce(g.revision, g_revision[1]) - 1
                RETURNING g.place::int, t.payload, t.content_type, t.headers
            )
            SELECT 3, granted.place, 0::bigint, granted.payload, granted.content_type, granted.headers FROM granted;
        GET DIAGNOSTICS done = ROW_COUNT;
        IF done < grants THEN
            mismatched := mismatched || duecourse.not_written(g_namespace, g_task_id, 0);
        END IF;
    END IF;

    IF successes > 0 THEN
        UPDATE duecourse.task t SET
            state = 'succeeded', due_time = NULL, revision = t.revision + 1, returns_in_row = 0,
            start_time = s.start_time, attempt_end_time = coalesce(s.end_time, s_end_time[1]), outcome = 'succeeded',
            outcome_digest = coalesce(s.outcome_digest, s_outcome_digest[1]),
            end_time = coalesce(s.end_time, s_end_time[1]),
            result_type = coalesce(s.result_type, t.result_type),
            result = CASE WHEN s.result_type IS NULL THEN t.result ELSE s.result END
        FROM unnest(
            string_to_array(s_namespace, separator), string_to_array(s_task_id, separator), s_revision,
            s_start_time, s_end_time, s_outcome_digest, s_result_type, s_result
        ) AS s (
            namespace, task_id, revision, start_time, end_time, outcome_digest, result_type, result
        )
        WHERE t.namespace = coalesce(s.namespace, s_namespace) AND t.task_id = s.task_id
            AND t.revision = coalesce(s.revision, s_revision[1]) - 1;
        GET DIAGNOSTICS done = ROW_COUNT;
        IF done < successes THEN
            mismatched := mismatched || duecourse.not_written(s_namespace, s_task_id, grants);
        END IF;
    END IF;

    IF cardinality(u_revision) > 0 THEN
        UPDATE duecourse.task t SET
            state = u.state, due_time = u.due_time, revision = u.revision, round = u.round,
            attempt_count = u.attempt_count, attempts_used = u.attempts_used, returns_in_row = u.returns_in_row,
            cancel_requested = u.cancel_requested, earlier_attempt_may_run = u.earlier_attempt_may_run,
            epoch = u.epoch, sign_of_life = u.sign_of_life, start_time = u.start_time,
            attempt_end_time = u.attempt_end_time, outcome = u.outcome, failure_type = u.failure_type,
            failure_message = u.failure_message, outcome_digest = u.outcome_digest, progress = u.progress,
            end_time = u.end_time, failure_reason = u.failure_reason, answers = u.answers,
            result_type = coalesce(u.result_type, t.result_type),
            result = CASE WHEN u.result_type IS NULL THEN t.result ELSE u.result END
        FROM unnest(
            string_to_array(u_namespace, separator), string_to_array(u_task_id, separator), u_state, u_due_time,
            u_revision, u_round, u_attempt_count, u_attempts_used, u_returns_in_row, u_cancel_requested,
            u_earlier_attempt_may_run, u_epoch, u_sign_of_life, u_start_time, u_attempt_end_time, u_outcome,
            u_failure_type, u_failure_message, u_outcome_digest, u_progress, u_end_time, u_failure_reason, u_answers,
            u_result_type, u_result
        ) AS u (
            namespace, task_id, state, due_time,
            revision, round, attempt_count, attempts_used, returns_in_row, cancel_requested,
            earlier_attempt_may_run, epoch, sign_of_life, start_time, attempt_end_time, outcome,
            failure_type, failure_message, outcome_digest, progress, end_time, failure_reason, answers,
            result_type, result
        )
        WHERE t.namespace = u.namespace AND t.task_id = u.task_id AND t.revision = u.revision - 1;
        GET DIAGNOSTICS done = ROW_COUNT;
        IF done < cardinality(u_revision) THEN
            mismatched := mismatched || duecourse.not_written(u_namespace, u_task_id, grants + successes);
        END IF;
    END IF;

    IF cardinality(a_of) > 0 THEN
        INSERT INTO duecourse.attempt (
            namespace, task_id, number, round, epoch, fencing_token, lease_time, sign_of_life, start_time, end_time,
            lease_token, worker, incarnation, node, outcome, failure_type, failure_message, outcome_digest, progress
        )
        SELECT a.namespace, a.task_id, a.number, a.round, a.epoch, a.fencing_token, a.lease_time, a.sign_of_life,
            a.start_time, a.end_time, a.lease_token, a.worker, a.incarnation, a.node, a.outcome, a.failure_type,
            a.failure_message, a.outcome_digest, a.progress
        FROM unnest(
            a_of, string_to_array(a_namespace, separator), string_to_array(a_task_id, separator), a_number, a_round,
            a_epoch, a_fencing_token, a_lease_time, a_sign_of_life, a_start_time, a_end_time, a_lease_token, a_worker,
            a_incarnation, a_node, a_outcome, a_failure_type, a_failure_message, a_outcome_digest, a_progress
        ) AS a (
            of_update, namespace, task_id, number, round,
            epoch, fencing_token, lease_time, sign_of_life, start_time, end_time, lease_token, worker,
            incarnation, node, outcome, failure_type, failure_message, outcome_digest, progress
        )
        WHERE a.of_update <> ALL (mismatched);
        IF 'returned' = ANY (a_outcome) THEN
            PERFORM duecourse.drop_old_returns(k.namespace, k.task_id, returned_kept)
            FROM unnest(
                string_to_array(a_namespace, separator), string_to_array(a_task_id, separator), a_outcome
            ) AS k (namespace, task_id, outcome)
            WHERE k.outcome = 'returned';
        END IF;
    END IF;

    RETURN QUERY SELECT 2, m, 0::bigint, NULL::bytea, NULL::bytea, NULL::bytea FROM unnest(mismatched) m;
END
$$;

-- Where in a list of tasks those are that this transaction has not written, counted on from `before`.
CREATE FUNCTION duecourse.not_written(namespaces text, task_ids text, before int) RETURNS int[]
LANGUAGE sql
BEGIN ATOMIC
    SELECT coalesce(array_agg(w.place::int + before), '{}')
    FROM unnest(
        string_to_array(namespaces, E'\x1f'), string_to_array(task_ids, E'\x1f')
    ) WITH ORDINALITY AS w (namespace, task_id, place)
    WHERE NOT EXISTS (
        SELECT FROM duecourse.task t
        WHERE t.namespace = coalesce(w.namespace, namespaces) AND t.task_id = w.task_id AND t.xmin = pg_current_xact_id()::xid
    );
END;

-- Of a task's attempts that were handed back, only the last ones are kept.
CREATE FUNCTION duecourse.drop_old_returns(of_namespace text, of_task_id text, kept int) RETURNS void
LANGUAGE sql
BEGIN ATOMIC
    DELETE FROM duecourse.attempt a
    WHERE a.namespace = of_namespace AND a.task_id = of_task_id AND a.outcome = 'returned' AND a.number < (
        SELECT min(last.number) FROM (
            SELECT r.number FROM duecourse.attempt r
            WHERE r.namespace = of_namespace AND r.task_id = of_task_id AND r.outcome = 'returned'
            ORDER BY r.number DESC LIMIT kept
        ) last
    );
END;

-- Begins terms, each shard on its own, in shard order. A shard that is in `bound_shards` is only taken from a holder
-- that `over_shards` and `over_holders` list for it. Returns every shard's row as it stands then.
CREATE FUNCTION duecourse.raise_epochs(
    cluster text, shards int[], holders bytea[], epochs bigint[], bound_shards int[], over_shards int[],
    over_holders bytea[], at bigint
) RETURNS TABLE (
    shard int, raised boolean, coordination text, epoch bigint, holder bytea, sequence_block bigint, raises bigint[]
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    wanted record;
    current duecourse.shard;
BEGIN
    FOR wanted IN
        SELECT w.* FROM unnest(shards, holders, epochs) AS w (shard, holder, epoch) ORDER BY w.shard
    LOOP
        SELECT * INTO current FROM duecourse.shard s WHERE s.shard = wanted.shard FOR NO KEY UPDATE;
        CONTINUE WHEN NOT FOUND;
        raised := current.coordination IN ('', cluster)
            AND coalesce(wanted.epoch, current.epoch + 1) > current.epoch
            AND (
                wanted.shard <> ALL (bound_shards)
                OR EXISTS (
                    SELECT FROM unnest(over_shards, over_holders) AS o (shard, holder)
                    WHERE o.shard = wanted.shard AND o.holder = current.holder
                )
            );
        IF raised THEN
            UPDATE duecourse.shard s SET
                coordination = cluster, epoch = coalesce(wanted.epoch, s.epoch + 1), holder = wanted.holder,
                sequence_block = s.sequence_block + 1,
                raises = (s.raises || at)[greatest(1, cardinality(s.raises) - 14):]
            WHERE s.shard = wanted.shard
            RETURNING * INTO current;
        END IF;
        shard := current.shard;
        coordination := current.coordination;
        epoch := current.epoch;
        holder := current.holder;
        sequence_block := current.sequence_block;
        raises := current.raises;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Deletes some of the shard's tasks that ended before an instant, the longest ended first.
CREATE FUNCTION duecourse.purge(of_shard int, of_epoch bigint, of_holder bytea, ended_before bigint, at_most int)
RETURNS TABLE (is_current boolean, epoch bigint, holder bytea, purged bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    SELECT s.epoch = of_epoch AND s.holder = of_holder, s.epoch, s.holder, 0 INTO is_current, epoch, holder, purged
    FROM duecourse.shard s WHERE s.shard = of_shard FOR SHARE;
    IF is_current THEN
        WITH doomed AS MATERIALIZED (
            SELECT t.namespace, t.task_id FROM duecourse.task t
            WHERE t.shard = of_shard AND t.end_time IS NOT NULL AND t.end_time < ended_before
            ORDER BY t.end_time LIMIT at_most
            FOR UPDATE SKIP LOCKED
        ), without_attempts AS (
            DELETE FROM duecourse.attempt a USING doomed d
            WHERE a.namespace = d.namespace AND a.task_id = d.task_id
        ), deleted AS (
            DELETE FROM duecourse.task t USING doomed d
            WHERE t.namespace = d.namespace AND t.task_id = d.task_id
            RETURNING 1
        )
        SELECT count(*) INTO purged FROM deleted;
    END IF;
    RETURN NEXT;
END
$$;

-- Ends a task that does not decode, if it is still as it was read.
CREATE FUNCTION duecourse.set_aside(
    of_shard int, of_epoch bigint, of_holder bytea, of_namespace text, of_task_id text, of_revision int, at bigint
) RETURNS TABLE (is_current boolean, epoch bigint, holder bytea, is_done boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    SELECT s.epoch = of_epoch AND s.holder = of_holder, s.epoch, s.holder, false INTO is_current, epoch, holder, is_done
    FROM duecourse.shard s WHERE s.shard = of_shard FOR SHARE;
    IF is_current THEN
        UPDATE duecourse.task t SET
            state = 'failed', failure_reason = 'record_corrupt', due_time = NULL, end_time = at,
            revision = least(t.revision, 2147483646) + 1
        WHERE t.namespace = of_namespace AND t.task_id = of_task_id AND t.shard = of_shard AND t.revision = of_revision
            AND t.end_time IS NULL;
        is_done := FOUND;
    END IF;
    RETURN NEXT;
END
$$;
