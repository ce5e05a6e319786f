-- name: commit
SELECT kind, place, number, first, second, third FROM duecourse.commit_writes($arguments)

-- name: raise_epochs
SELECT shard, raised, coordination, epoch, holder, sequence_block, raises
FROM duecourse.raise_epochs($1, $2, $3, $4, $5, $6, $7, $8)

-- name: bind
UPDATE duecourse.shard SET coordination = $1, holder = CASE WHEN $2 THEN ''::bytea ELSE holder END
WHERE coordination = '' OR $2
RETURNING shard

-- name: purge
SELECT is_current, epoch, holder, purged FROM duecourse.purge($1, $2, $3, $4, $5)

-- name: set_aside
SELECT is_current, epoch, holder, is_done FROM duecourse.set_aside($1, $2, $3, $4, $5, $6, $7)

-- name: accept_clock
SELECT duecourse.accept_clock($1, $2, $3, $4)

-- name: confirm_clock
SELECT duecourse.confirm_clock($1, $2, $3, $4, $5)
