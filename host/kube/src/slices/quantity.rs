//! Amounts as Kubernetes writes them (`80Gi`, `500m`, `1e3`): an API server answers another text for the same amount.

/// Nano is the finest that there is (`resource.Quantity`).
const FINEST: i64 = 9;

/// The text of an amount in which equal amounts are equal. What is no amount stays as it is.
pub(super) fn normal(text: &str) -> String {
    nanos(text).map_or_else(|| text.to_owned(), |nanos| format!("{nanos}n"))
}

/// The amount in billionths, rounded up. None: it is none, or too large for one.
fn nanos(text: &str) -> Option<i128> {
    let (negative, text) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && part.is_empty()) || part.contains('.') {
        return None;
    }
    let part = part.trim_end_matches('0');
    let digits: i128 = match format!("{whole}{part}").trim_start_matches('0') {
        "" => 0,
        digits => digits.parse().ok()?,
    };
    let (twos, tens) = scale(suffix)?;
    let amount = digits.checked_mul(1i128.checked_shl(twos)?)?;
    let amount = shift(amount, tens + FINEST - i64::try_from(part.len()).ok()?)?;
    Some(if negative { -amount } else { amount })
}

/// The powers of two and of ten for which a suffix stands.
fn scale(suffix: &str) -> Option<(u32, i64)> {
    Some(match suffix {
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "" => (0, 0),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => {
            let exponent: i64 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            (0, (-64..=64).contains(&exponent).then_some(exponent)?)
        }
    })
}

/// So many places to the left; to the right it rounds up.
fn shift(amount: i128, places: i64) -> Option<i128> {
    let factor = |places: u32| 10i128.checked_pow(places);
    match u32::try_from(places) {
        Ok(places) if amount != 0 => amount.checked_mul(factor(places)?),
        Ok(_) => Some(0),
        Err(_) => {
            let Some(divisor) = factor(u32::try_from(-places).ok()?) else {
                return Some(i128::from(amount != 0));
            };
            Some(amount / divisor + i128::from(amount % divisor != 0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_equal_however_they_are_written() {
        for (a, b) in [
            ("80Gi", "81920Mi"),
            ("0.5", "500m"),
            ("1e3", "1k"),
            ("1E3", "1000"),
            ("1E", "1000P"),
            ("1.50Ki", "1536"),
            ("+4", "4.000"),
            ("0", "-0"),
            ("00.1n", "1n"),
            ("-1.5", "-1500m"),
        ] {
            assert_eq!(normal(a), normal(b), "{a} {b}");
        }
        for (a, b) in [("1G", "1Gi"), ("1", "1000"), ("1m", "1M"), ("1", "-1")] {
            assert_ne!(normal(a), normal(b), "{a} {b}");
        }
    }

    #[test]
    fn what_is_no_amount_stays_as_it_is() {
        let long = "9".repeat(64);
        for text in ["", ".", "Gi", "1.2.3", "1e", "1e999", "1Zi", "1 k", "-", "x", "é", &long] {
            assert_eq!(normal(text), text);
        }
    }
}
