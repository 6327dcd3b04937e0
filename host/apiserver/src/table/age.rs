//! Ages as kubectl prints them.

use jiff::Timestamp;
use serde_json::Value;

/// Text for an age without a time.
const UNKNOWN: &str = "<unknown>";
const MINUTE: i64 = 60;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;
const YEAR: i64 = 365 * DAY;

/// Returns how long ago a time in an object was, as [`since`] does.
pub fn age(time: &Value) -> String {
    since(time, Timestamp::now())
}

/// Returns how long ago a time in an object was: `5m3s`, with two or three significant figures; `<unknown>` for what is no time.
pub(super) fn since(time: &Value, now: Timestamp) -> String {
    let time = time
        .as_str()
        .and_then(|text| text.parse::<Timestamp>().ok());
    time.map_or_else(
        || UNKNOWN.to_owned(),
        |time| human(now.duration_since(time).as_secs()),
    )
}

fn human(seconds: i64) -> String {
    let (minutes, hours, days, years) = (
        seconds / MINUTE,
        seconds / HOUR,
        seconds / DAY,
        seconds / YEAR,
    );
    match seconds {
        // The clocks of two machines may differ by a second.
        ..=-2 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        _ if seconds < 2 * MINUTE => format!("{seconds}s"),
        _ if minutes < 10 => two(minutes, "m", seconds % MINUTE, "s"),
        _ if hours < 3 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, "h", minutes % 60, "m"),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 8 => two(days, "d", hours % 24, "h"),
        _ if years < 2 => format!("{days}d"),
        _ if years < 8 => two(years, "y", days % 365, "d"),
        _ => format!("{years}y"),
    }
}

/// A number and what is left of it, if anything is.
fn two(large: i64, unit: &str, small: i64, part: &str) -> String {
    if small == 0 {
        format!("{large}{unit}")
    } else {
        format!("{large}{unit}{small}{part}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ages_format_as_in_kubectl() {
        let cases = [
            (-2, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (303, "5m3s"),
            (600, "10m"),
            (3 * HOUR - 1, "179m"),
            (3 * HOUR, "3h"),
            (7 * HOUR + 30 * MINUTE, "7h30m"),
            (8 * HOUR + 30 * MINUTE, "8h"),
            (47 * HOUR, "47h"),
            (2 * DAY, "2d"),
            (2 * DAY + 5 * HOUR, "2d5h"),
            (8 * DAY + 5 * HOUR, "8d"),
            (2 * YEAR - 1, "729d"),
            (2 * YEAR + 3 * DAY, "2y3d"),
            (8 * YEAR + 3 * DAY, "8y"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(human(seconds), expected, "{seconds} seconds");
        }
    }

    #[test]
    fn missing_time_has_unknown_age() {
        let now = "2026-01-01T00:05:03Z".parse().unwrap();
        assert_eq!(since(&json!("2026-01-01T00:00:00Z"), now), "5m3s");
        assert_eq!(since(&json!("2026-01-01T00:00:00.500000Z"), now), "5m2s");
        for time in [json!(null), json!("yesterday"), json!(5)] {
            assert_eq!(since(&time, now), "<unknown>");
        }
    }
}
