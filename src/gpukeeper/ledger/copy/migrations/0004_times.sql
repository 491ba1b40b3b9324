-- Times that a machine's role wrote: 'infinity', or a year that readers cannot represent, made every query fail that
-- covers that row, for all machines. When something was received is never later than the server's time; all other times
-- must be ones that every reader can represent.
CREATE FUNCTION gpukeeper.is_readable(moment timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE AS
$$ SELECT moment IS NULL OR (moment > '1970-01-01 00:00+00' AND moment < '9000-01-01 00:00+00') $$;

CREATE FUNCTION gpukeeper.received_now() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'views' THEN
        NEW.at := CASE WHEN gpukeeper.is_readable(NEW.at) THEN least(NEW.at, now()) ELSE now() END;
    ELSIF NEW.seen IS NOT NULL THEN
        NEW.seen := CASE WHEN gpukeeper.is_readable(NEW.seen) THEN least(NEW.seen, now()) ELSE now() END;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER received BEFORE UPDATE ON gpukeeper.machines FOR EACH ROW EXECUTE FUNCTION gpukeeper.received_now();
CREATE TRIGGER received BEFORE INSERT OR UPDATE ON gpukeeper.views FOR EACH ROW EXECUTE FUNCTION gpukeeper.received_now();

-- What is there already and cannot be read by anyone.
UPDATE gpukeeper.machines SET seen = now() WHERE NOT gpukeeper.is_readable(seen);
UPDATE gpukeeper.views SET body = body WHERE NOT gpukeeper.is_readable(at);
UPDATE gpukeeper.ledgers SET signals_until = NULL WHERE NOT gpukeeper.is_readable(signals_until);
UPDATE gpukeeper.ledgers SET usage_until = NULL WHERE NOT gpukeeper.is_readable(usage_until);
UPDATE gpukeeper.ledgers SET begun = now() WHERE NOT gpukeeper.is_readable(begun);
DELETE FROM gpukeeper.lines WHERE NOT gpukeeper.is_readable(at);
DELETE FROM gpukeeper.signals WHERE NOT gpukeeper.is_readable(minute);
DELETE FROM gpukeeper.usage WHERE NOT gpukeeper.is_readable(hour);
DELETE FROM gpukeeper.runs WHERE NOT gpukeeper.is_readable(at);
UPDATE gpukeeper.replies SET at = now() WHERE NOT gpukeeper.is_readable(at);

ALTER TABLE gpukeeper.lines ADD CONSTRAINT readable CHECK (gpukeeper.is_readable(at));
ALTER TABLE gpukeeper.signals ADD CONSTRAINT readable CHECK (gpukeeper.is_readable(minute));
ALTER TABLE gpukeeper.usage ADD CONSTRAINT readable CHECK (gpukeeper.is_readable(hour));
ALTER TABLE gpukeeper.runs ADD CONSTRAINT readable CHECK (gpukeeper.is_readable(at));
ALTER TABLE gpukeeper.replies ADD CONSTRAINT readable CHECK (gpukeeper.is_readable(at));
ALTER TABLE gpukeeper.ledgers ADD CONSTRAINT readable
    CHECK (gpukeeper.is_readable(begun) AND gpukeeper.is_readable(signals_until) AND gpukeeper.is_readable(usage_until));

-- Any role can take an advisory lock, and keep it: months would neither be made nor dropped. A row of the settings can
-- be locked by their owner only.
DO $$
DECLARE
    before text := pg_get_functiondef('gpukeeper.keep_partitions()'::regprocedure);
    after text := replace(before, 'IF NOT pg_try_advisory_xact_lock(hashtext(''gpukeeper.keep_partitions'')) THEN',
                          'PERFORM FROM gpukeeper.settings FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN');
BEGIN
    IF after = before THEN
        RAISE EXCEPTION 'gpukeeper.keep_partitions() is not the function of migration 3';
    END IF;
    EXECUTE after;
END $$;
