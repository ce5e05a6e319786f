-- name: lock
SELECT pg_advisory_lock(7400, 1)

-- name: bootstrap
CREATE SCHEMA IF NOT EXISTS duecourse;
CREATE TABLE IF NOT EXISTS duecourse.migration (
    number int PRIMARY KEY,
    name text NOT NULL,
    checksum bytea NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE IF NOT EXISTS duecourse.schema (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version int NOT NULL,
    min_node_version int NOT NULL
);

-- name: applied
SELECT number, name, checksum FROM duecourse.migration ORDER BY number

-- name: record
INSERT INTO duecourse.migration (number, name, checksum) VALUES ($1, $2, $3)

-- name: set_version
INSERT INTO duecourse.schema (version, min_node_version) VALUES ($1, $2)
ON CONFLICT (only_row) DO UPDATE SET version = excluded.version, min_node_version = excluded.min_node_version

-- name: count_shards
SELECT count(*) FROM duecourse.shard

-- name: insert_shards
INSERT INTO duecourse.shard (shard, slot_from, slot_until)
SELECT * FROM unnest($1::int[], $2::int[], $3::int[])

-- name: schema_exists
SELECT to_regclass('duecourse.schema') IS NOT NULL

-- name: versions
SELECT version, min_node_version FROM duecourse.schema
