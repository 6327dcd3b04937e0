//! Extended resources of a container, as `resources` has them, and Kubernetes' quantities as far as these need them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;

use super::{Context, ManifestError};
use nodedock_model::ExtendedResource;

/// Returns the number of devices of each resource that a container requests. Native resources, such as `cpu`, and those with quantity 0 are
/// left out.
///
/// As in Kubernetes a limit is also the request, the two of an extended resource are the same, and there is no request without its limit.
pub(super) fn extended(
    container: &str,
    resources: &ResourceRequirements,
    context: &Context,
) -> Result<BTreeMap<ExtendedResource, u32>, ManifestError> {
    let wrong = |what: String| context.shape(&format!("container {container:?}: {what}"));
    let limits = counts("limits", resources.limits.as_ref()).map_err(wrong)?;
    let requests = counts("requests", resources.requests.as_ref()).map_err(wrong)?;
    for (name, requested) in &requests {
        let why = match limits.get(name) {
            Some(limit) if limit == requested => continue,
            Some(limit) => {
                format!(
                    "is {requested} and its limit {limit}: of an extended resource they are the same"
                )
            }
            None => "has no limit, which an extended resource needs".to_owned(),
        };
        return Err(wrong(format!("resources.requests.{name} {why}")));
    }
    Ok(limits.into_iter().filter(|(_, count)| *count > 0).collect())
}

fn counts(
    field: &str,
    quantities: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>,
) -> Result<BTreeMap<ExtendedResource, u32>, String> {
    let extended = quantities.into_iter().flatten();
    let extended = extended.filter(|(name, _)| !is_native(name));
    let counts = extended.map(|(name, quantity)| {
        let resource =
            ExtendedResource::new(name).map_err(|error| format!("resources.{field}: {error}"))?;
        let count = whole(&quantity.0).map_err(|why| format!("resources.{field}.{name}: {why}"))?;
        Ok((resource, count))
    });
    counts.collect()
}

/// Kubernetes' own resources: a name without a domain, or of kubernetes.io.
fn is_native(name: &str) -> bool {
    match name.split_once('/') {
        None => true,
        Some((domain, _)) => domain == "kubernetes.io" || domain.ends_with(".kubernetes.io"),
    }
}

/// A quantity (apimachinery, `resource.Quantity`) that is a whole number of devices: `4`, `1k`, `2000m`, `4e0`.
fn whole(text: &str) -> Result<u32, String> {
    let parsed = parse(text).unwrap_or(Err("is no quantity such as 4"));
    parsed.map_err(|why| format!("{:?} {why}", text.chars().take(64).collect::<String>()))
}

const FRACTION: &str = "is no whole number";
const TOO_LARGE: &str = "is more devices than a node can have";

/// A count of devices, or what is wrong with it.
type Count = Result<u32, &'static str>;

/// Suffixes of powers of 1000, from the smallest, and of 1024.
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
const DECIMAL_MIN: i32 = -9;
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// Digits of a number and of an exponent that are looked at: more than any quantity has.
const DIGITS_MAX: usize = 18;
const EXPONENT_DIGITS_MAX: usize = 3;

/// None: not a quantity.
fn parse(text: &str) -> Option<Count> {
    let negative = text.starts_with('-');
    let text = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (integer.is_empty() && fraction.is_empty()) {
        return None;
    }
    let (ten, two) = powers(suffix)?;
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{integer}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Some(Ok(0));
    }
    if negative {
        return Some(Err("is negative"));
    }
    if digits.len() > DIGITS_MAX {
        // With so many digits it is either far too large or far too fine.
        return Some(Err(if fraction.is_empty() {
            TOO_LARGE
        } else {
            FRACTION
        }));
    }
    let mantissa: u128 = digits.parse().ok()?;
    Some(scale(
        mantissa << two,
        ten - i32::try_from(fraction.len()).ok()?,
    ))
}

/// The powers of ten and of two of a suffix or an exponent.
fn powers(suffix: &str) -> Option<(i32, u32)> {
    if let Some((_, ten)) = DECIMAL
        .into_iter()
        .zip((DECIMAL_MIN..).step_by(3))
        .find(|(known, _)| *known == suffix)
    {
        return Some((ten, 0));
    }
    if let Some((_, two)) = BINARY
        .into_iter()
        .zip((10..).step_by(10))
        .find(|(known, _)| *known == suffix)
    {
        return Some((0, two));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    let is_number = !digits.is_empty()
        && digits.len() <= EXPONENT_DIGITS_MAX
        && digits.bytes().all(|b| b.is_ascii_digit());
    is_number
        .then(|| exponent.strip_prefix('+').unwrap_or(exponent).parse().ok())?
        .map(|ten| (ten, 0))
}

fn scale(mut number: u128, mut ten: i32) -> Count {
    while ten < 0 {
        if !number.is_multiple_of(10) {
            return Err(FRACTION);
        }
        (number, ten) = (number / 10, ten + 1);
    }
    while ten > 0 && number <= u128::from(u32::MAX) {
        (number, ten) = (number * 10, ten - 1);
    }
    u32::try_from(number).map_err(|_| TOO_LARGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kubernetes_number_notation_is_read() {
        let cases = [
            ("0", 0),
            ("0m", 0),
            ("-0", 0),
            ("4", 4),
            ("+4", 4),
            ("04", 4),
            ("4.", 4),
            ("4.0", 4),
            (".5k", 500),
            ("2k", 2000),
            ("2000m", 2),
            ("3000000u", 3),
            ("1Ki", 1024),
            ("0.5Ki", 512),
            ("1e3", 1000),
            ("12E+1", 120),
            ("1200e-2", 12),
            ("4294967295", u32::MAX),
        ];
        for (text, count) in cases {
            assert_eq!(whole(text), Ok(count), "{text}");
        }
    }

    #[test]
    fn what_is_no_count_says_why() {
        let huge = "9".repeat(1000);
        let fine = format!("0.{}", "1".repeat(1000));
        let cases = [
            ("", "no quantity"),
            (".", "no quantity"),
            ("1.2.3", "no quantity"),
            ("four", "no quantity"),
            ("4 ", "no quantity"),
            ("1K", "no quantity"),
            ("1e", "no quantity"),
            ("1e9999", "no quantity"),
            ("--1", "no quantity"),
            ("0.5", "no whole number"),
            ("1500m", "no whole number"),
            ("1e-999", "no whole number"),
            (fine.as_str(), "no whole number"),
            ("-1", "negative"),
            ("4294967296", "more devices"),
            ("1e999", "more devices"),
            ("8Ei", "more devices"),
            (huge.as_str(), "more devices"),
        ];
        for (text, why) in cases {
            let error = whole(text).unwrap_err();
            assert!(error.contains(why) && error.len() < 200, "{text}: {error}");
        }
    }
}
