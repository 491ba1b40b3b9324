-- The tables of the fleet database: a copy of what each machine recorded, never an authority.
CREATE SCHEMA IF NOT EXISTS gpukeeper;

-- One row. `retention`: how long lines, signals and usage are kept.
CREATE TABLE gpukeeper.settings (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    retention interval NOT NULL DEFAULT '400 days' CHECK (retention >= '1 day')
);
INSERT INTO gpukeeper.settings DEFAULT VALUES;

CREATE TABLE gpukeeper.machines (
    name text PRIMARY KEY,
    role name NOT NULL UNIQUE,
    added timestamptz NOT NULL DEFAULT now(),
    seen timestamptz,
    version text
);

-- The journals of a machine. A ledger that was created again, or restored from a backup, gets a new number, because its
-- lines count from an earlier number again. `shipped`: the last line of it that is here; changed only together with them.
CREATE TABLE gpukeeper.ledgers (
    machine text NOT NULL REFERENCES gpukeeper.machines,
    ledger integer NOT NULL,
    id text NOT NULL,
    begun timestamptz NOT NULL DEFAULT now(),
    shipped bigint NOT NULL,
    signals_until timestamptz,
    usage_until timestamptz,
    PRIMARY KEY (machine, ledger)
);

CREATE TABLE gpukeeper.lines (
    machine text NOT NULL,
    ledger integer NOT NULL,
    line bigint NOT NULL,
    at timestamptz NOT NULL,
    type text NOT NULL,
    platform text,
    place text,
    workload text,
    key text,
    owner text,
    rule text,
    result text,
    pass_id bigint,
    step text,
    error boolean NOT NULL,
    body jsonb NOT NULL,
    PRIMARY KEY (machine, ledger, line, at)
) PARTITION BY RANGE (at);
-- Keys may be longer than an index entry.
CREATE INDEX lines_key ON gpukeeper.lines (machine, left(key, 200)) WHERE key IS NOT NULL;
CREATE INDEX lines_error ON gpukeeper.lines (at) WHERE error;
CREATE INDEX lines_at ON gpukeeper.lines USING brin (at);

-- `series` is a digest of the other columns.
CREATE TABLE gpukeeper.series (
    machine text NOT NULL,
    series uuid NOT NULL,
    key text NOT NULL,
    signal text NOT NULL,
    device text NOT NULL,
    slice boolean NOT NULL,
    PRIMARY KEY (machine, series)
);
CREATE INDEX series_key ON gpukeeper.series (machine, left(key, 200));

-- `mean` is null where a reading of that minute was not a number.
CREATE TABLE gpukeeper.signals (
    machine text NOT NULL,
    series uuid NOT NULL,
    minute timestamptz NOT NULL,
    mean double precision,
    samples integer NOT NULL,
    PRIMARY KEY (machine, series, minute)
) PARTITION BY RANGE (minute);

CREATE TABLE gpukeeper.usage (
    machine text NOT NULL,
    hour timestamptz NOT NULL,
    device text NOT NULL,
    holder text NOT NULL,
    body jsonb NOT NULL,
    PRIMARY KEY (machine, hour, device, holder)
) PARTITION BY RANGE (hour);

-- `report` is the run's report.json; null, with `problem`, where it could not be read.
CREATE TABLE gpukeeper.runs (
    machine text NOT NULL,
    run text NOT NULL,
    at timestamptz NOT NULL,
    node text NOT NULL,
    verdict text NOT NULL,
    reason text NOT NULL,
    gpus jsonb NOT NULL,
    report jsonb,
    problem text,
    PRIMARY KEY (machine, run)
);

CREATE TABLE gpukeeper.views (
    machine text PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    seq bigint NOT NULL,
    body jsonb NOT NULL
);

-- `document` is what was signed, byte by byte. The other columns only find it; a machine trusts none of them.
CREATE TABLE gpukeeper.requests (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    machine text NOT NULL REFERENCES gpukeeper.machines,
    created timestamptz NOT NULL DEFAULT now(),
    expires timestamptz NOT NULL,
    document text NOT NULL CHECK (length(document) <= 65536),
    signature text NOT NULL CHECK (length(signature) <= 256),
    UNIQUE (id, machine)
);
CREATE INDEX requests_machine ON gpukeeper.requests (machine, id);

CREATE TABLE gpukeeper.replies (
    request bigint PRIMARY KEY,
    machine text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    state text NOT NULL CHECK (state IN ('answered', 'refused', 'expired')),
    body jsonb NOT NULL,
    FOREIGN KEY (request, machine) REFERENCES gpukeeper.requests (id, machine) ON DELETE CASCADE
);

-- Only hints: both sides also poll.
CREATE FUNCTION gpukeeper.announce_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('gpukeeper_requests', NEW.machine);
    RETURN NULL;
END $$;
CREATE TRIGGER announce AFTER INSERT ON gpukeeper.requests
    FOR EACH ROW EXECUTE FUNCTION gpukeeper.announce_request();

CREATE FUNCTION gpukeeper.announce_reply() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('gpukeeper_replies', NEW.request::text);
    RETURN NULL;
END $$;
CREATE TRIGGER announce AFTER INSERT ON gpukeeper.replies
    FOR EACH ROW EXECUTE FUNCTION gpukeeper.announce_reply();

CREATE FUNCTION gpukeeper.announce_view() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('gpukeeper_views', NEW.machine);
    RETURN NULL;
END $$;
CREATE TRIGGER announce AFTER INSERT OR UPDATE ON gpukeeper.views
    FOR EACH ROW EXECUTE FUNCTION gpukeeper.announce_view();
