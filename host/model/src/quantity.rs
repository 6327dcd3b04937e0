//! Kubernetes quantities (`80Gi`, `500m`, `1e3`): their equality, since an API server returns them in another notation than it received, and
//! their sums.

/// `resource.Quantity` has no finer unit than nano.
const NANO_DIGITS: i64 = 9;

/// Returns a text that is the same for equal quantities. A text that is no quantity is returned unchanged.
pub fn normalized(text: &str) -> String {
    nanos(text).map_or_else(|| text.to_owned(), |nanos| format!("{nanos}n"))
}

/// Returns the amount in billionths, rounded away from zero; `None` for a malformed quantity or one out of range.
pub fn nanos(text: &str) -> Option<i128> {
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let fraction = fraction.trim_end_matches('0');
    let digits: i128 = match format!("{whole}{fraction}").trim_start_matches('0') {
        "" => 0,
        digits => digits.parse().ok()?,
    };
    let (twos, tens) = exponents(suffix)?;
    let amount = digits.checked_mul(1i128 << twos)?;
    let amount = scaled(
        amount,
        tens + NANO_DIGITS - i64::try_from(fraction.len()).ok()?,
    )?;
    Some(if negative { -amount } else { amount })
}

/// Returns an amount in billionths as a quantity: with the largest binary suffix that leaves it whole, else in decimal.
pub fn of_nanos(nanos: i128) -> String {
    const UNITS: [&str; 4] = ["", "m", "u", "n"];
    const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut unit = 10i128.pow(u32::try_from(NANO_DIGITS).unwrap_or(0));
    let mut units = UNITS.iter();
    let mut suffix = units.next().unwrap_or(&"");
    while nanos % unit != 0 {
        unit /= 1000;
        suffix = units.next().unwrap_or(&"n");
    }
    let mut amount = nanos / unit;
    let mut binary = BINARY.iter();
    if suffix.is_empty() && amount != 0 {
        suffix = binary.next().unwrap_or(&"");
        while amount % 1024 == 0 {
            let Some(larger) = binary.next() else { break };
            (amount, suffix) = (amount / 1024, larger);
        }
    }
    format!("{amount}{suffix}")
}

/// Returns the powers of two and of ten that a suffix denotes.
fn exponents(suffix: &str) -> Option<(u32, i64)> {
    const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if let Some(index) = DECIMAL.iter().position(|known| *known == suffix) {
        return Some((0, 3 * i64::try_from(index).ok()? - NANO_DIGITS));
    }
    if let Some(index) = BINARY.iter().position(|known| *known == suffix) {
        return Some((10 * (u32::try_from(index).ok()? + 1), 0));
    }
    let exponent: i64 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    (-64..=64).contains(&exponent).then_some((0, exponent))
}

/// Returns `amount` times ten to the `exponent`, rounded up.
fn scaled(amount: i128, exponent: i64) -> Option<i128> {
    let power = u32::try_from(exponent.unsigned_abs()).ok()?;
    match (10i128.checked_pow(power), exponent >= 0) {
        _ if amount == 0 => Some(0),
        (Some(factor), true) => amount.checked_mul(factor),
        (None, true) => None,
        (Some(divisor), false) => Some(amount / divisor + i128::from(amount % divisor != 0)),
        (None, false) => Some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_equal_in_whatever_notation() {
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
            assert_eq!(normalized(a), normalized(b), "{a} {b}");
        }
        for (a, b) in [("1G", "1Gi"), ("1", "1000"), ("1m", "1M"), ("1", "-1")] {
            assert_ne!(normalized(a), normalized(b), "{a} {b}");
        }
    }

    #[test]
    fn sums_print_as_equal_quantities() {
        for (text, shown) in [
            ("80Gi", "80Gi"),
            ("81920Mi", "80Gi"),
            ("0", "0"),
            ("1500m", "1500m"),
            ("-3", "-3"),
            ("1e3", "1000"),
            ("0.000001", "1u"),
            ("7n", "7n"),
            ("2048Ei", "2048Ei"),
        ] {
            assert_eq!(of_nanos(nanos(text).unwrap()), shown, "{text}");
            assert_eq!(normalized(shown), normalized(text));
        }
    }

    #[test]
    fn invalid_quantity_is_unchanged() {
        let long = "9".repeat(64);
        for text in [
            "", ".", "Gi", "1.2.3", "1e", "1e999", "1Zi", "1 k", "-", "x", "é", "+-1", &long,
        ] {
            assert_eq!(normalized(text), text);
        }
    }
}
