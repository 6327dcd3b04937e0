//! Values below `/sys` that drivers changed, in words: for `release claim` and `explain claim`.

use nodedock_proto::node::v1;
use serde::Serialize;

use super::output::printable;

/// A value, as it is printed.
#[derive(Serialize)]
pub(super) struct Value {
    driver: String,
    path: String,
    before: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    left: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    found: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    end: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<Problem>,
}

#[derive(Serialize)]
struct Problem {
    code: String,
    message: String,
}

impl From<v1::SysfsValue> for Value {
    fn from(value: v1::SysfsValue) -> Self {
        let v1::SysfsValue { driver, path, before, left, found, end, problem } = value;
        let problem = problem.map(|v1::Problem { code, message, .. }| Problem { code, message });
        Self { driver, path, before, left, found, end, problem }
    }
}

impl Value {
    /// One line about it.
    pub(super) fn words(&self) -> String {
        let place = format!("/sys/{}", printable(&self.path));
        let of = format!("changed by driver {}", self.driver);
        let (before, found, left) = (shown(&self.before), shown(&self.found), shown(&self.left));
        let why = match &self.problem {
            Some(Problem { code, message }) => format!(" ({code}): {}", printable(message)),
            None => String::new(),
        };
        match self.end.as_str() {
            "" => format!("{place} was {before}, {of} to {left}"),
            "possible" => format!("{place} is {found}, {of}, and would be put back to {before}"),
            "put-back" => format!("{place} was {found}, {of}, and is put back to {before}{why}"),
            "as-before" => format!("{place} is {before}, as it was before driver {} changed it", self.driver),
            _ => format!("{place}, {of}, is left as it is{why}"),
        }
    }
}

fn shown(text: &Option<String>) -> String {
    text.as_deref().map_or_else(|| "unknown".to_owned(), |text| format!("{:?}", printable(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(end: &str, before: Option<&str>, problem: Option<&str>) -> String {
        let problem = problem.map(|message| v1::Problem {
            code: "value-changed".to_owned(),
            message: message.to_owned(),
            ..v1::Problem::default()
        });
        let value = v1::SysfsValue {
            driver: "led.example.com".to_owned(),
            path: "class/led\n0".to_owned(),
            before: before.map(str::to_owned),
            left: Some("2".to_owned()),
            found: Some("1".to_owned()),
            end: end.to_owned(),
            problem,
        };
        Value::from(value).words()
    }

    #[test]
    fn each_end_has_words_of_its_own() {
        let place = "/sys/class/led\u{fffd}0";
        let of = "changed by driver led.example.com";
        for (end, before, problem, expected) in [
            ("", Some("0"), None, format!("{place} was \"0\", {of} to \"2\"")),
            ("", None, None, format!("{place} was unknown, {of} to \"2\"")),
            ("possible", Some("0"), None, format!("{place} is \"1\", {of}, and would be put back to \"0\"")),
            ("put-back", Some("0"), None, format!("{place} was \"1\", {of}, and is put back to \"0\"")),
            (
                "as-before",
                Some("0"),
                None,
                format!("{place} is \"0\", as it was before driver led.example.com changed it"),
            ),
            (
                "left",
                Some("0"),
                Some("no\tway"),
                format!("{place}, {of}, is left as it is (value-changed): no\u{fffd}way"),
            ),
        ] {
            assert_eq!(value(end, before, problem), expected);
        }
    }
}
