//! Durations and sizes as people write them: `7d`, `250ms`, `1MiB`.

use std::time::Duration;

/// Reads `7d`, `30s`, `1h 30m`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    if text.trim() == "0" {
        return Ok(Duration::ZERO);
    }
    humantime::parse_duration(text.trim()).map_err(|_| {
        format!("`{text}` is not a duration: write a number and a unit, such as 250ms, 30s, 5m, 12h or 7d")
    })
}

/// Writes a duration as [`duration`] reads it.
pub(crate) fn duration_text(duration: Duration) -> String {
    const UNITS: [(u128, &str); 5] =
        [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms")];
    let mut rest = duration.as_millis();
    let mut parts = Vec::new();
    for (size, unit) in UNITS {
        if rest >= size {
            parts.push(format!("{}{unit}", rest / size));
            rest %= size;
        }
    }
    if parts.is_empty() { "0s".to_owned() } else { parts.join(" ") }
}

const SIZES: [(&str, usize); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Reads `1MiB`, `64KiB`, `500B`.
pub(super) fn size(text: &str) -> Result<usize, String> {
    let wrong =
        || format!("`{text}` is not a size: write a whole number and a unit, such as 500B, 64KiB or 1MiB");
    let trimmed = text.trim();
    let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim();
    let factor = SIZES
        .iter()
        .find(|(name, _)| unit.eq_ignore_ascii_case(name))
        .map(|(_, factor)| *factor)
        .ok_or_else(wrong)?;
    number.parse::<usize>().ok().and_then(|number| number.checked_mul(factor)).ok_or_else(wrong)
}

/// Writes a size as [`size`] reads it.
pub(crate) fn size_text(size: usize) -> String {
    let (name, factor) = SIZES
        .into_iter()
        .find(|(_, factor)| size >= *factor && size.is_multiple_of(*factor))
        .unwrap_or(("B", 1));
    format!("{}{name}", size / factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        for text in ["7d", "250ms", "1h 30m", "0s", "3d", "90m"] {
            let value = duration(text).expect("a duration");
            assert_eq!(duration(&duration_text(value)), Ok(value), "{text}");
        }
        for text in ["1MiB", "64KiB", "500B", "0B", "2GiB", "1536KiB"] {
            let value = size(text).expect("a size");
            assert_eq!(size(&size_text(value)), Ok(value), "{text}");
        }
        assert_eq!(
            (duration_text(Duration::from_secs(259_200)), size_text(1 << 20)),
            ("3d".into(), "1MiB".into())
        );
    }

    #[test]
    fn what_is_no_unit_is_refused_with_examples() {
        for text in ["", "7", "soon", "-1s"] {
            assert!(duration(text).expect_err(text).contains("such as 250ms"));
        }
        for text in ["", "7", "1MB!", "99999999999GiB", "1.5MiB"] {
            assert!(size(text).expect_err(text).contains("such as 500B"));
        }
    }
}
