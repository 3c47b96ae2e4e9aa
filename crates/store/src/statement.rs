//! Statements that a configuration names as handlers: one each, and no word that ends the transaction.

/// What SQL stores say of a script.
pub(crate) const NO_SCRIPTS: &str = "only a store on Redis runs scripts: give this consumer an `sql` handler";

/// What a statement may refer to.
pub(crate) const PARAMETERS: [&str; 9] =
    [":id", ":topic", ":type", ":key", ":payload", ":headers", ":occurred_at", ":seq", ":group"];

/// What the database would not refuse, but must not be done here. Says why.
pub(crate) fn check_shape(sql: &str) -> Result<(), String> {
    const CONTROL: [&str; 6] = ["BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE"];
    let words = words(sql);
    let mut statements = words.split(|word| word == ";").filter(|statement| !statement.is_empty());
    let Some(statement) = statements.next() else { return Err("it is empty".to_owned()) };
    if CONTROL.contains(&statement[0].as_str()) {
        return Err(format!(
            "{} would end or split the transaction that holds the work and the mark together; leave it out",
            statement[0]
        ));
    }
    if statement.windows(2).any(|pair| pair == ["OR", "ROLLBACK"]) {
        return Err("OR ROLLBACK would undo the work of other messages too; use OR ABORT".to_owned());
    }
    match statements.next() {
        Some(_) => Err("it is more than one statement; only one is run".to_owned()),
        None => Ok(()),
    }
}

/// The bare words of `sql` in capitals, and its semicolons. Comments, texts and quoted names are left out.
fn words(sql: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = sql;
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let skip = match first {
            _ if word > 0 => {
                words.push(rest[..word].to_ascii_uppercase());
                word
            }
            '-' if rest.starts_with("--") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest[2..].find("*/").map_or(rest.len(), |end| end + 4),
            '\'' | '"' | '`' => rest[1..].find(first).map_or(rest.len(), |end| end + 2),
            '[' => rest.find(']').map_or(rest.len(), |end| end + 1),
            _ => {
                if first == ';' {
                    words.push(first.to_string());
                }
                first.len_utf8()
            }
        };
        rest = &rest[skip..];
    }
    words
}
