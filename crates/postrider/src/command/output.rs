//! How answers look: aligned tables and plain words for people, JSON for scripts.
//!
//! Everything that was asked for goes to standard output, everything about it to standard error, and colour only
//! where a person will see it.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
use message::Status;
use serde::Serialize;

use super::failure::Failure;

/// Where answers go.
pub(super) struct Output {
    out: std::io::BufWriter<std::io::Stdout>,
    json: bool,
    colour: bool,
}

impl Output {
    /// To standard output, as JSON or for people.
    pub(super) fn new(json: bool) -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let colour = !plain && std::io::stdout().is_terminal();
        Self { out: std::io::BufWriter::new(std::io::stdout()), json, colour }
    }

    /// Whether a script reads this.
    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// Answers with JSON, or with what `people` writes.
    pub(super) fn answer(
        &mut self,
        value: &impl Serialize,
        people: impl FnOnce(&mut Self) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if !self.json {
            return people(self);
        }
        let text = serde_json::to_string_pretty(value).expect("answers are plain data");
        self.line(text)
    }

    /// One line.
    pub(super) fn line(&mut self, text: impl AsRef<str>) -> Result<(), Failure> {
        writeln!(self.out, "{}", text.as_ref()).map_err(|error| Failure::writing(&error))
    }

    /// Bytes as they are.
    pub(super) fn raw(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.out.write_all(bytes).map_err(|error| Failure::writing(&error))
    }

    /// Shows what was written so far.
    pub(super) fn flush(&mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|error| Failure::writing(&error))
    }

    /// A word beside the answer, which a script that reads the answer must not meet.
    pub(super) fn note(&mut self, text: impl AsRef<str>) -> Result<(), Failure> {
        self.flush()?;
        if !self.json {
            // Standard error that cannot be written to leaves nobody to tell.
            let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
        }
        Ok(())
    }

    /// Why the command failed.
    pub(super) fn failure(&mut self, failure: &Failure) {
        let _ = self.out.flush();
        let text = if self.json {
            let exit = failure.exit as u8;
            serde_json::json!({ "error": { "code": failure.code, "detail": failure.text, "exit": exit } })
                .to_string()
        } else {
            format!("postrider: {}", failure.text)
        };
        let _ = writeln!(std::io::stderr(), "{text}");
    }

    /// Rows under a heading. Nothing at all when there are none.
    pub(super) fn table<const N: usize>(
        &mut self,
        heading: [&str; N],
        rows: impl IntoIterator<Item = [Cell; N]>,
    ) -> Result<(), Failure> {
        let mut table = self.grid();
        table.set_header(heading.map(|text| Cell::new(text.to_uppercase()).add_attribute(Attribute::Bold)));
        table.add_rows(rows);
        self.lines_of(&mut table)
    }

    /// Rows without a heading.
    pub(super) fn rows<const N: usize>(
        &mut self,
        rows: impl IntoIterator<Item = [Cell; N]>,
    ) -> Result<(), Failure> {
        let mut table = self.grid();
        table.add_rows(rows);
        self.lines_of(&mut table)
    }

    /// Names and values, one pair a line.
    pub(super) fn pairs(
        &mut self,
        pairs: impl IntoIterator<Item = (&'static str, Cell)>,
    ) -> Result<(), Failure> {
        let mut table = self.grid();
        table.add_rows(
            pairs.into_iter().map(|(name, value)| [Cell::new(name).add_attribute(Attribute::Dim), value]),
        );
        self.lines_of(&mut table)
    }

    fn grid(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if self.colour {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table
    }

    fn lines_of(&mut self, table: &mut Table) -> Result<(), Failure> {
        // Room between columns and none before the first, so that a line begins where a word begins.
        table.column_iter_mut().for_each(|column| {
            column.set_padding((0, 2));
        });
        table.style_text_only();
        let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        lines.iter().try_for_each(|line| self.line(line))
    }
}

/// A status in its colour.
pub(super) fn status(status: Status) -> Cell {
    let colour = match status {
        Status::Pending | Status::InFlight => Color::Cyan,
        Status::Sent => Color::Green,
        Status::Failed => Color::Yellow,
        Status::Dead => Color::Red,
    };
    Cell::new(status).fg(colour)
}

/// A text in one line, or a dash.
pub(super) fn text(text: Option<&str>) -> Cell {
    Cell::new(text.map_or_else(|| "-".to_owned(), |text| shown(text, 80)))
}

/// A text without what would move a terminal's cursor, cut after `most` characters.
pub(super) fn shown(text: &str, most: usize) -> String {
    let clean: String =
        text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(most + 1).collect();
    if clean.chars().count() > most {
        format!("{}…", clean.chars().take(most.saturating_sub(1)).collect::<String>())
    } else {
        clean
    }
}

/// A moment, exactly and as people say it.
pub(super) fn moment(at: Option<DateTime<Utc>>) -> Cell {
    Cell::new(at.map_or_else(|| "-".to_owned(), |at| format!("{} ({})", exact(at), relative(at, Utc::now()))))
}

/// A moment, exactly.
pub(super) fn exact(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// A moment as people say it.
pub(super) fn relative(at: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let distance = now - at;
    let age = rough(distance.abs().to_std().unwrap_or_default());
    if distance < chrono::TimeDelta::zero() { format!("in {age}") } else { format!("{age} ago") }
}

/// A duration in its largest unit.
pub(super) fn rough(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        1..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_cannot_move_the_cursor_of_a_terminal() {
        assert_eq!(shown("a\x1b[2Jb\nc", 80), "a [2Jb c");
        assert_eq!(shown("abcdef", 4), "abc…");
        assert_eq!(shown("abcd", 4), "abcd");
    }

    #[test]
    fn moments_are_said_in_their_largest_unit() {
        let now = Utc::now();
        let said = |seconds: i64| relative(now - chrono::TimeDelta::seconds(seconds), now);
        assert_eq!(said(5), "5 s ago");
        assert_eq!(said(-90), "in 90 s");
        assert_eq!(said(600), "10 min ago");
        assert_eq!(said(86_400), "24 h ago");
        assert_eq!(said(864_000), "10 days ago");
    }
}
