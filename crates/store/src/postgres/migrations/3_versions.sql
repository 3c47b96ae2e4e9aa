-- What is the newest version of an entity that somebody has applied: an older one must not overwrite it.
CREATE TABLE inbox_versions (
    scope   text COLLATE "C" NOT NULL,
    entity  text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (scope, entity)
);

-- Whether this version is newer than any that was applied; if so, it is the newest from now on. In the caller's
-- transaction: of two that ask at the same time one waits for the other.
CREATE FUNCTION postrider_newer(scope text, entity text, version bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO inbox_versions VALUES (postrider_newer.scope, postrider_newer.entity, postrider_newer.version)
    ON CONFLICT (scope, entity) DO UPDATE SET version = excluded.version
        WHERE inbox_versions.version < excluded.version;
    RETURN FOUND;
END
$$;

-- Whether `expected` was applied last (0: none); if so, it is `version` from now on.
CREATE FUNCTION postrider_swap(scope text, entity text, expected bigint, version bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF postrider_swap.expected IS NULL OR postrider_swap.version IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'postrider_swap: a version is missing';
    END IF;
    UPDATE inbox_versions v SET version = postrider_swap.version
    WHERE v.scope = postrider_swap.scope AND v.entity = postrider_swap.entity
          AND v.version = postrider_swap.expected;
    IF NOT FOUND AND postrider_swap.expected = 0 THEN
        INSERT INTO inbox_versions VALUES (postrider_swap.scope, postrider_swap.entity, postrider_swap.version)
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN FOUND;
END
$$;
