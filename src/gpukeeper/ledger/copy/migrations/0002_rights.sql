-- Who may do what. A machine's role reads and writes the rows of its machine, and nothing else; the web role reads
-- everything and writes requests. The owner of the tables is not restricted.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'gpukeeper_machines') THEN
        CREATE ROLE gpukeeper_machines NOLOGIN;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'gpukeeper_web') THEN
        CREATE ROLE gpukeeper_web LOGIN;
    END IF;
END $$;

-- The machine whose role is connected. Not current_user, which is the owner inside this function. pg_temp comes last in
-- the search path: otherwise a caller could replace types and tables by temporary ones of their own.
CREATE FUNCTION gpukeeper.this_machine() RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS
$$ SELECT name FROM gpukeeper.machines WHERE role = session_user $$;
REVOKE ALL ON FUNCTION gpukeeper.this_machine() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION gpukeeper.this_machine() TO gpukeeper_machines, gpukeeper_web;

REVOKE ALL ON SCHEMA gpukeeper FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA gpukeeper FROM PUBLIC;
GRANT USAGE ON SCHEMA gpukeeper TO gpukeeper_machines, gpukeeper_web;

GRANT SELECT ON gpukeeper.settings, gpukeeper.migrations TO gpukeeper_machines, gpukeeper_web;
GRANT SELECT ON gpukeeper.machines, gpukeeper.ledgers, gpukeeper.lines, gpukeeper.series, gpukeeper.signals,
    gpukeeper.usage, gpukeeper.runs, gpukeeper.views, gpukeeper.requests, gpukeeper.replies
    TO gpukeeper_machines, gpukeeper_web;
GRANT UPDATE (seen, version) ON gpukeeper.machines TO gpukeeper_machines;
GRANT INSERT ON gpukeeper.ledgers, gpukeeper.lines, gpukeeper.series, gpukeeper.signals, gpukeeper.usage,
    gpukeeper.runs, gpukeeper.views, gpukeeper.replies TO gpukeeper_machines;
GRANT UPDATE (shipped, signals_until, usage_until) ON gpukeeper.ledgers TO gpukeeper_machines;
GRANT UPDATE (body) ON gpukeeper.usage TO gpukeeper_machines;
GRANT UPDATE (at, seq, body) ON gpukeeper.views TO gpukeeper_machines;
GRANT INSERT (machine, expires, document, signature) ON gpukeeper.requests TO gpukeeper_web;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['machines', 'ledgers', 'lines', 'series', 'signals', 'usage', 'runs', 'views',
                                'requests', 'replies'] LOOP
        EXECUTE format('ALTER TABLE gpukeeper.%I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY web_reads ON gpukeeper.%I FOR SELECT TO gpukeeper_web USING (true)', name);
    END LOOP;
    -- The subselect is evaluated once a statement, not once a row.
    FOREACH name IN ARRAY ARRAY['ledgers', 'lines', 'series', 'signals', 'usage', 'runs', 'views', 'replies'] LOOP
        EXECUTE format(
            'CREATE POLICY own ON gpukeeper.%I FOR ALL TO gpukeeper_machines
             USING (machine = (SELECT gpukeeper.this_machine()))
             WITH CHECK (machine = (SELECT gpukeeper.this_machine()))', name);
    END LOOP;
END $$;
CREATE POLICY own ON gpukeeper.machines FOR ALL TO gpukeeper_machines
    USING (name = (SELECT gpukeeper.this_machine())) WITH CHECK (name = (SELECT gpukeeper.this_machine()));
CREATE POLICY own ON gpukeeper.requests FOR SELECT TO gpukeeper_machines
    USING (machine = (SELECT gpukeeper.this_machine()));
CREATE POLICY web_writes ON gpukeeper.requests FOR INSERT TO gpukeeper_web WITH CHECK (true);
