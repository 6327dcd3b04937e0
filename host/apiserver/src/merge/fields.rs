//! Sets of field paths, in memory and as `fieldsV1`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// One step of a path, as `fieldsV1` writes it: `f:name`, `k:{"key":"value"}`, `v:"value"`, `i:0`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Step(String);

impl Step {
    pub(super) fn field(name: &str) -> Self {
        Self(format!("f:{name}"))
    }

    pub(super) fn keys<'a>(keys: impl Iterator<Item = (&'a str, Value)>) -> Self {
        let keys: BTreeMap<_, _> = keys.collect();
        Self(format!(
            "k:{}",
            serde_json::to_string(&keys).unwrap_or_default()
        ))
    }

    pub(super) fn value(value: &Value) -> Self {
        Self(format!("v:{value}"))
    }

    /// Reads a step in any valid JSON notation.
    fn read(text: &str) -> Result<Self, String> {
        let malformed =
            |why: &dyn std::fmt::Display| format!("malformed path element {text:?}: {why}");
        match text.split_at_checked(2) {
            Some(("f:", _)) => Ok(Self(text.to_owned())),
            Some(("k:", keys)) => {
                let keys: BTreeMap<String, Value> =
                    serde_json::from_str(keys).map_err(|why| malformed(&why))?;
                Ok(Self::keys(
                    keys.iter()
                        .map(|(key, value)| (key.as_str(), value.clone())),
                ))
            }
            Some(("v:", value)) => Ok(Self::value(
                &serde_json::from_str(value).map_err(|why| malformed(&why))?,
            )),
            Some(("i:", index)) => index
                .parse::<u32>()
                .map(|index| Self(format!("i:{index}")))
                .map_err(|why| malformed(&why)),
            _ => Err(malformed(&"unknown type")),
        }
    }

    fn is_field(&self) -> bool {
        self.0.starts_with("f:")
    }
}

/// Formats a step as messages show it: `.name`, `[key="value"]`, `[="value"]`, `[0]`.
impl std::fmt::Display for Step {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.split_at_checked(2) {
            Some(("f:", name)) => write!(formatter, ".{name}"),
            Some(("k:", keys)) => {
                let keys: BTreeMap<String, Value> = serde_json::from_str(keys).unwrap_or_default();
                let keys: Vec<_> = keys
                    .iter()
                    .map(|(key, value)| format!("{key}={value}"))
                    .collect();
                write!(formatter, "[{}]", keys.join(","))
            }
            Some(("v:", value)) => write!(formatter, "[={value}]"),
            _ => write!(formatter, "[{}]", self.0.trim_start_matches("i:")),
        }
    }
}

/// A set of paths, as a tree: whether the path to this place is in the set, and the paths below.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FieldSet {
    pub(super) is_member: bool,
    below: BTreeMap<Step, FieldSet>,
}

impl FieldSet {
    /// Returns the set with the path to this place only.
    pub(super) fn leaf() -> Self {
        Self::leaf_if(true)
    }

    /// Returns the set with the path to this place, or the empty set.
    pub(super) fn leaf_if(is_member: bool) -> Self {
        Self {
            is_member,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.is_member && self.below.is_empty()
    }

    pub(super) fn get(&self, step: &Step) -> Option<&Self> {
        self.below.get(step)
    }

    /// Adds the paths of `set` below `step`.
    pub(super) fn put(&mut self, step: Step, set: Self) {
        if !set.is_empty() {
            self.below.insert(step, set);
        }
    }

    pub(super) fn union(mut self, other: Self) -> Self {
        self.is_member |= other.is_member;
        for (step, set) in other.below {
            let own = self.below.remove(&step).unwrap_or_default();
            self.below.insert(step, own.union(set));
        }
        self
    }

    /// Returns the paths that are in `other` too.
    pub(super) fn intersection(&self, other: &Self) -> Self {
        self.select(Some(other), &|own, theirs| own && theirs)
    }

    /// Returns the paths that are not in `other`.
    pub(super) fn difference(&self, other: &Self) -> Self {
        self.select(Some(other), &|own, theirs| own && !theirs)
    }

    fn select(&self, other: Option<&Self>, keep: &dyn Fn(bool, bool) -> bool) -> Self {
        let mut set = Self {
            is_member: keep(self.is_member, other.is_some_and(|other| other.is_member)),
            below: BTreeMap::new(),
        };
        for (step, own) in &self.below {
            set.put(
                step.clone(),
                own.select(other.and_then(|other| other.get(step)), keep),
            );
        }
        set
    }

    /// Returns the set without a path of fields and the paths below it.
    pub(super) fn without_tree(mut self, path: &[&str]) -> Self {
        match path {
            [] => Self::default(),
            [first, rest @ ..] => {
                let step = Step::field(first);
                let below = self.below.remove(&step).unwrap_or_default();
                self.put(step, below.without_tree(rest));
                self
            }
        }
    }

    /// Returns the set without a path of fields, with the paths below it.
    pub(super) fn without(mut self, path: &[&str]) -> Self {
        let Some((first, rest)) = path.split_first() else {
            self.is_member = false;
            return self;
        };
        let step = Step::field(first);
        let below = self.below.remove(&step).unwrap_or_default();
        self.put(step, below.without(rest));
        self
    }

    /// Returns the set with the fields on the way to its paths.
    pub(super) fn with_parents(&self) -> Self {
        let below = self.below.iter().map(|(step, set)| {
            let mut set = set.with_parents();
            set.is_member |= step.is_field();
            (step.clone(), set)
        });
        Self {
            is_member: self.is_member,
            below: below.collect(),
        }
    }

    /// Returns the paths as messages show them, in order.
    pub(super) fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.list("", &mut paths);
        paths
    }

    fn list(&self, prefix: &str, paths: &mut Vec<String>) {
        if self.is_member {
            paths.push(prefix.to_owned());
        }
        for (step, set) in &self.below {
            set.list(&format!("{prefix}{step}"), paths);
        }
    }

    /// Reads `fieldsV1`.
    ///
    /// # Errors
    /// A path element that is malformed, or a value that is no object.
    pub(super) fn read(fields: &Value) -> Result<Self, String> {
        let Value::Object(fields) = fields else {
            return Err("a set of fields is an object".to_owned());
        };
        let mut set = Self::default();
        for (name, below) in fields {
            if name == "." {
                set.is_member = true;
                continue;
            }
            let mut below = Self::read(below)?;
            below.is_member |= below.below.is_empty();
            set.put(Step::read(name)?, below);
        }
        Ok(set)
    }

    /// Returns the set as `fieldsV1`.
    pub(super) fn to_value(&self) -> Value {
        let mut fields = Map::new();
        if self.is_member && !self.below.is_empty() {
            fields.insert(".".into(), Value::Object(Map::new()));
        }
        fields.extend(
            self.below
                .iter()
                .map(|(step, set)| (step.0.clone(), set.to_value())),
        );
        Value::Object(fields)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn field_set_round_trips() {
        let fields = json!({"f:metadata": {"f:finalizers": {".": {}, "v:\"a\"": {}}},
            "f:status": {"f:devices": {"k:{\"device\":\"gpu-0\",\"driver\":\"d\"}": {".": {}, "f:data": {}}}}});
        let set = FieldSet::read(&fields).expect("it is well formed");
        assert_eq!(set.to_value(), fields);
        let device = ".status.devices[device=\"gpu-0\",driver=\"d\"]";
        assert_eq!(
            set.paths(),
            [
                ".metadata.finalizers".to_owned(),
                ".metadata.finalizers[=\"a\"]".into(),
                device.into(),
                format!("{device}.data")
            ]
        );
    }

    #[test]
    fn keys_are_equal_in_whatever_order() {
        let read = |text| Step::read(text).expect("it is well formed");
        assert_eq!(
            read(r#"k:{"b": 1, "a": "x"}"#),
            read(r#"k:{"a":"x","b":1}"#)
        );
        for malformed in ["", "f", "x:1", "k:[]", "k:{", "v:", "i:-1", "ü"] {
            let error = Step::read(malformed).expect_err("it is malformed");
            assert!(error.starts_with("malformed path element"), "{error}");
        }
    }
}
