//! The list of cases.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

const LIST: &str = include_str!("../cases.yaml");

/// The part of a case's ID before the dot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    Wire,
    Idempotency,
    Crash,
    Slices,
    Features,
    Conduct,
    DevicePlugin,
}

impl Level {
    const ALL: [(&str, Self); 7] = [
        ("wire", Self::Wire),
        ("idempotency", Self::Idempotency),
        ("crash", Self::Crash),
        ("slices", Self::Slices),
        ("features", Self::Features),
        ("conduct", Self::Conduct),
        ("device-plugin", Self::DevicePlugin),
    ];
}

/// A case in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// `LEVEL.NAME`
    pub id: String,
    /// A statement that is true of a driver that passes.
    pub sentence: String,
    /// The steps and the outcome, as far as the sentence does not say them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<String>,
    /// The source of the rule.
    pub source: String,
    /// Cases without which it says nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<String>,
    /// Features that a driver must have for the case to apply: names joined by `+`.
    #[serde(default, rename = "if", skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
}

/// A defect of a list of cases.
#[derive(Debug, PartialEq, Eq)]
pub struct CaseError(String);

impl std::fmt::Display for CaseError {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for CaseError {}

impl Case {
    /// The level of the ID; an ID of the list has one.
    pub fn level(&self) -> Option<Level> {
        let (level, _) = self.id.split_once('.')?;
        Level::ALL
            .iter()
            .find(|(name, _)| *name == level)
            .map(|(_, level)| *level)
    }

    /// Returns whether a name is this case's ID or level.
    pub fn is_named(&self, name: &str) -> bool {
        self.id == name
            || self
                .id
                .split_once('.')
                .is_some_and(|(level, _)| level == name)
    }

    /// Returns whether this case has no meaning without another case.
    pub(crate) fn needs(&self, other: &Case, list: &[Case]) -> bool {
        self.after.iter().any(|id| {
            *id == other.id
                || list
                    .iter()
                    .any(|case| case.id == *id && case.needs(other, list))
        })
    }
}

/// The cases of this version.
///
/// # Errors
///
/// The list is not YAML of this shape, an ID occurs twice or has no level, or a case comes before one that it needs.
pub fn cases() -> Result<Vec<Case>, CaseError> {
    parse(LIST)
}

fn parse(text: &str) -> Result<Vec<Case>, CaseError> {
    let list: Vec<Case> =
        serde_saphyr::from_str(text).map_err(|error| CaseError(error.to_string()))?;
    let mut known = BTreeSet::new();
    for case in &list {
        let id = &case.id;
        if case.level().is_none() {
            return Err(CaseError(format!("{id}: it has none of the levels")));
        }
        if let Some(late) = case
            .after
            .iter()
            .find(|after| !known.contains(after.as_str()))
        {
            return Err(CaseError(format!(
                "{id}: it comes after {late}, which is no case before it"
            )));
        }
        if !known.insert(id.as_str()) {
            return Err(CaseError(format!("{id}: it is there twice")));
        }
    }
    Ok(list)
}

/// Checks that each case has code, and all code a case.
pub(crate) fn check<'a>(
    list: &[Case],
    code: impl Iterator<Item = &'a str>,
) -> Result<(), CaseError> {
    let mut code: BTreeSet<&str> = code.collect();
    for case in list {
        if !code.remove(case.id.as_str()) {
            return Err(CaseError(format!(
                "{}: this runner has no code for it",
                case.id
            )));
        }
    }
    match code.first() {
        Some(id) => Err(CaseError(format!("{id}: there is code and no case"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: &str = "- id: wire.a\n  sentence: A.\n  source: B\n";

    #[test]
    fn cases_and_their_code_match() {
        let list = cases().unwrap();
        check(&list, crate::cases::all().iter().map(|(id, _)| *id)).unwrap();
        assert!(
            list.iter()
                .all(|case| case.sentence.ends_with('.') && !case.source.is_empty())
        );
        let error = check(&list[1..], list.iter().map(|case| case.id.as_str())).unwrap_err();
        assert_eq!(
            error.to_string(),
            "wire.registers: there is code and no case"
        );
        let error = check(&list, ["wire.registers"].into_iter()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "wire.endpoint: this runner has no code for it"
        );
    }

    #[test]
    fn list_with_a_mistake_is_refused() {
        assert_eq!(parse(CASE).unwrap().len(), 1);
        for (text, why) in [
            (format!("{CASE}{CASE}"), "wire.a: it is there twice"),
            (
                CASE.replace("wire.a", "cable.a"),
                "cable.a: it has none of the levels",
            ),
            (
                format!("{CASE}  after: [wire.b]\n"),
                "wire.a: it comes after wire.b, which is no case before it",
            ),
            (format!("{CASE}  when: dra\n"), "when"),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
