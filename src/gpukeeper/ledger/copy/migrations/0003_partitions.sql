-- Partitions by month, made ahead, and dropped after the retention. Any daemon may call keep_partitions(): it has no
-- arguments, and what it does follows from the clock of the server and the settings.
CREATE TABLE gpukeeper.lines_other PARTITION OF gpukeeper.lines DEFAULT;
CREATE TABLE gpukeeper.signals_other PARTITION OF gpukeeper.signals DEFAULT;
CREATE TABLE gpukeeper.usage_other PARTITION OF gpukeeper.usage DEFAULT;

-- Rows of that month that are in the default partition (a clock was wrong, or the month was not made in time) move.
CREATE FUNCTION gpukeeper.make_partition(parent text, at_column text, month timestamptz) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    part text := parent || '_' || to_char(month, 'YYYYMM');
    until timestamptz := month + interval '1 month';
BEGIN
    IF to_regclass(format('gpukeeper.%I', part)) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE gpukeeper.%I (LIKE gpukeeper.%I INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', part, parent);
    EXECUTE format('LOCK TABLE gpukeeper.%I IN ACCESS EXCLUSIVE MODE', parent || '_other');
    EXECUTE format(
        'WITH moved AS (DELETE FROM gpukeeper.%I WHERE %I >= $1 AND %I < $2 RETURNING *)
         INSERT INTO gpukeeper.%I SELECT * FROM moved', parent || '_other', at_column, at_column, part)
        USING month, until;
    EXECUTE format('ALTER TABLE gpukeeper.%I ATTACH PARTITION gpukeeper.%I FOR VALUES FROM (%L) TO (%L)',
                   parent, part, month, until);
    RETURN true;
END $$;
REVOKE ALL ON FUNCTION gpukeeper.make_partition(text, text, timestamptz) FROM PUBLIC;

CREATE FUNCTION gpukeeper.keep_partitions() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '5s' AS $$
DECLARE
    horizon timestamptz := (SELECT now() - retention FROM gpukeeper.settings);
    parent text;
    at_column text;
    month timestamptz;
    part text;
    changed integer := 0;
    dropped boolean := false;
BEGIN
    -- One at a time; the others need not wait, since rows without a month go to the default partition.
    IF NOT pg_try_advisory_xact_lock(hashtext('gpukeeper.keep_partitions')) THEN
        RETURN 0;
    END IF;
    FOR parent, at_column IN VALUES ('lines', 'at'), ('signals', 'minute'), ('usage', 'hour') LOOP
        month := date_trunc('month', greatest(horizon, now() - interval '400 days'));
        WHILE month <= date_trunc('month', now() + interval '3 months') LOOP
            IF gpukeeper.make_partition(parent, at_column, month) THEN
                changed := changed + 1;
            END IF;
            month := month + interval '1 month';
        END LOOP;
        FOR part IN
            SELECT c.relname FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
            WHERE i.inhparent = format('gpukeeper.%I', parent)::regclass AND c.relname ~ ('^' || parent || '_[0-9]{6}$')
              AND to_date(right(c.relname, 6), 'YYYYMM') + interval '1 month' <= horizon
        LOOP
            EXECUTE format('DROP TABLE gpukeeper.%I', part);
            changed := changed + 1;
            dropped := true;
        END LOOP;
        EXECUTE format('DELETE FROM gpukeeper.%I WHERE %I < $1', parent || '_other', at_column) USING horizon;
    END LOOP;
    IF dropped THEN
        DELETE FROM gpukeeper.series s WHERE NOT EXISTS
            (SELECT FROM gpukeeper.signals v WHERE v.machine = s.machine AND v.series = s.series);
    END IF;
    DELETE FROM gpukeeper.runs WHERE at < horizon;
    DELETE FROM gpukeeper.requests WHERE created < greatest(horizon, now() - interval '30 days');
    RETURN changed;
END $$;
REVOKE ALL ON FUNCTION gpukeeper.keep_partitions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION gpukeeper.keep_partitions() TO gpukeeper_machines;
SELECT gpukeeper.keep_partitions();
