//! The checks of names, attributes, capacities, taints, statuses of devices and container edits, with the bounds of [`crate::limit`]. Each
//! is here once: for drivers' answers ([`crate::answer`]), for objects of the local API, and for statuses that the host writes.
//!
//! A check is given a value and adds a [`Violation`] to its [`Findings`] for each rule that the value breaks: where, and why. Rules without
//! another source are those of Kubernetes (`pkg/apis/resource/validation`); a caller adds its own. Pure.

mod device;
mod edits;
mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;

use strum::{Display, IntoStaticStr};

use super::is_dns_label;
use super::limit::{LABEL_KEY_BYTES_MAX, LABEL_VALUE_BYTES_MAX, LABELS_MAX, PATH_BYTES_MAX};
use super::rule::{is_plain_path, is_quantity, is_unprintable};

pub use device::{
    attribute, attribute_count, attribute_values, binding_conditions, capacity, counter_set, taint,
};
pub use edits::edits;
pub use status::{
    condition_message, condition_reason, condition_type, data, hardware_address, interface_address,
    interface_name, network,
};

/// Violations that are kept of one value: a driver can break a rule in thousands of entries.
const VIOLATIONS_MAX: usize = 64;

/// A part of a value, by its name in the driver contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Field {
    Access,
    AdditionalGids,
    Annotations,
    Args,
    Attribute,
    Attributes,
    #[strum(to_string = "attributes and capacities")]
    AttributesAndCapacities,
    #[strum(to_string = "attribute values")]
    AttributeValues,
    BindingConditions,
    BindingFailureConditions,
    Booleans,
    Capacities,
    Capacity,
    ClosId,
    Code,
    Compatibility,
    Conditions,
    Consumes,
    ContainerInterface,
    ContainerPath,
    CounterSet,
    Counters,
    Data,
    DefaultAmount,
    Details,
    Device,
    DeviceNodes,
    Devices,
    Edits,
    Env,
    EventSubsystems,
    FileMode,
    FsType,
    Groups,
    HardwareAddress,
    Hooks,
    HostInterface,
    HostPath,
    Identity,
    IntelRdt,
    InterfaceName,
    Ints,
    Ips,
    Key,
    Kind,
    Max,
    Memo,
    Message,
    Min,
    Mounts,
    Multiplier,
    Name,
    NetDevices,
    Network,
    NodeAllocatable,
    NumaNodes,
    Options,
    Path,
    PerContainer,
    PerPod,
    Policy,
    Pool,
    Pools,
    Range,
    Readings,
    Reason,
    Requests,
    Schemata,
    SharedCounters,
    Status,
    Step,
    Summary,
    Taints,
    Text,
    Texts,
    Value,
    Values,
    Version,
    Versions,
}

/// One step of the way to a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Field(Field),
    /// An entry of a list.
    Entry(Field, usize),
    /// An entry with a name.
    Named(Field, String),
}

impl From<Field> for Step {
    fn from(field: Field) -> Self {
        Self::Field(field)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(field) => field.fmt(f),
            Self::Entry(field, index) => write!(f, "{field}[{index}]"),
            Self::Named(field, name) if is_plain(name) => write!(f, "{field} {name}"),
            Self::Named(field, name) => write!(f, "{field} {}", shown(name)),
        }
    }
}

fn is_plain(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    (1..=LABEL_KEY_BYTES_MAX).contains(&name.len()) && name.bytes().all(plain)
}

/// The rule that a value breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// It is missing or empty.
    Required,
    /// Entries of a list.
    TooMany {
        count: usize,
        max: usize,
    },
    TooLong {
        bytes: usize,
        max: usize,
    },
    /// An earlier entry has the same identity.
    Duplicate(String),
    Invalid {
        value: String,
        rule: String,
    },
    /// It must not be there.
    Forbidden(&'static str),
    /// A rule about several values, as a sentence.
    Inconsistent(String),
}

/// A value that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The innermost first.
    steps: Vec<Step>,
    pub reason: Reason,
}

impl Violation {
    /// Returns the way to the value, from the outside.
    pub fn path(&self) -> impl DoubleEndedIterator<Item = &Step> {
        self.steps.iter().rev()
    }

    /// Returns the field with the value, if it is not the checked value itself.
    pub fn field(&self) -> Option<Field> {
        self.steps.first().map(|step| match step {
            Step::Field(field) | Step::Entry(field, _) | Step::Named(field, _) => *field,
        })
    }
}

/// Uses the names of the driver contract.
impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.steps.first();
        for step in self.steps.iter().skip(1).rev() {
            write!(f, "{step}: ")?;
        }
        let what = last.map_or_else(|| "the value".to_owned(), Step::to_string);
        match &self.reason {
            Reason::Required => write!(f, "{what} is empty"),
            Reason::TooMany { count, max } => {
                write!(f, "{count} {what}, at most {max} are allowed")
            }
            Reason::TooLong { bytes, max } => {
                write!(f, "{what} has {bytes} bytes, at most {max} are allowed")
            }
            Reason::Duplicate(identity) => write!(f, "{what}: {} occurs twice", shown(identity)),
            Reason::Invalid { value, rule } => write!(f, "{what} {} {rule}", shown(value)),
            Reason::Forbidden(why) => write!(f, "{what}: {why}"),
            Reason::Inconsistent(why) => match last {
                Some(step) => write!(f, "{step}: {why}"),
                None => f.write_str(why),
            },
        }
    }
}

/// Quotes and cuts a text for a message.
fn shown(text: &str) -> String {
    match text.char_indices().nth(64) {
        Some((end, _)) => format!("{:?}", format!("{}…", &text[..end])),
        None => format!("{text:?}"),
    }
}

/// Findings of checks, in their order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings(Vec<Violation>);

impl Findings {
    /// Runs a check. Fails with what it finds.
    pub fn of<T>(check: impl FnOnce(&mut Self) -> T) -> Result<T, Self> {
        let mut findings = Self::default();
        let checked = check(&mut findings);
        findings.accept(checked)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the value if nothing was found. Fails with what was found first, and the rest.
    pub fn accept<T>(self, value: T) -> Result<T, Findings> {
        if self.is_empty() {
            Ok(value)
        } else {
            Err(self)
        }
    }

    /// Returns the first violation.
    pub fn first(&self) -> Option<&Violation> {
        self.0.first()
    }

    /// Adds a violation of the checked value itself.
    pub fn add(&mut self, reason: Reason) {
        if self.0.len() < VIOLATIONS_MAX {
            self.0.push(Violation {
                steps: Vec::new(),
                reason,
            });
        }
    }

    /// Adds what another check of the same value found.
    pub fn extend(&mut self, found: Findings) {
        let room = VIOLATIONS_MAX.saturating_sub(self.0.len());
        self.0.extend(found.0.into_iter().take(room));
    }

    pub fn add_at(&mut self, step: impl Into<Step>, reason: Reason) {
        self.at(|| step.into(), |findings| findings.add(reason));
    }

    /// Adds a violation of a rule about several values.
    pub fn inconsistent(&mut self, why: impl Into<String>) {
        self.add(Reason::Inconsistent(why.into()));
    }

    /// Runs checks of a part of the value: what they find is at `step`.
    pub fn at<T>(&mut self, step: impl FnOnce() -> Step, check: impl FnOnce(&mut Self) -> T) -> T {
        let known = self.0.len();
        let checked = check(self);
        if let found @ [_, ..] = &mut self.0[known..] {
            let step = step();
            for violation in found {
                violation.steps.push(step.clone());
            }
        }
        checked
    }

    /// Runs checks of a field, like [`Self::at`].
    pub fn field<T>(&mut self, field: Field, check: impl FnOnce(&mut Self) -> T) -> T {
        self.at(|| Step::Field(field), check)
    }

    /// Runs checks of an entry with a name, like [`Self::at`].
    pub fn named<T>(&mut self, field: Field, name: &str, check: impl FnOnce(&mut Self) -> T) -> T {
        self.at(|| Step::Named(field, name.to_owned()), check)
    }

    /// Checks the length of a list. Entries of a list that is too long are not to be looked at.
    pub fn at_most(&mut self, field: Field, count: usize, max: usize) -> bool {
        if count > max {
            self.add_at(field, Reason::TooMany { count, max });
        }
        count <= max
    }

    /// Checks the length of a list, and then each entry.
    pub fn each<T>(
        &mut self,
        field: Field,
        entries: &[T],
        max: usize,
        mut check: impl FnMut(&mut Self, &T),
    ) {
        if self.at_most(field, entries.len(), max) {
            for (index, entry) in entries.iter().enumerate() {
                self.at(
                    || Step::Entry(field, index),
                    |findings| check(findings, entry),
                );
            }
        }
    }

    /// Checks that no two entries of a list have the same identity.
    pub fn unique<'a>(&mut self, field: Field, identities: impl IntoIterator<Item = &'a str>) {
        let mut seen = BTreeSet::new();
        for (index, identity) in identities.into_iter().enumerate() {
            if !seen.insert(identity) {
                let reason = Reason::Duplicate(identity.to_owned());
                self.add_at(Step::Entry(field, index), reason);
            }
        }
    }

    /// Adds a violation unless the value keeps the rule.
    pub fn require(&mut self, holds: bool, value: &str, rule: &str) {
        if !holds {
            self.add(Reason::Invalid {
                value: value.to_owned(),
                rule: rule.to_owned(),
            });
        }
    }

    /// Returns a text as one of the model's types, whose error says what it is and which rule it breaks.
    pub fn parsed<T, E: fmt::Display>(&mut self, parsed: Result<T, E>) -> Option<T> {
        parsed
            .map_err(|error| self.inconsistent(error.to_string()))
            .ok()
    }

    /// Checks the length of a text.
    pub fn bytes(&mut self, bytes: usize, max: usize) -> bool {
        if bytes > max {
            self.add(Reason::TooLong { bytes, max });
        }
        bytes <= max
    }

    /// Checks a text for one line: bounded, of printable characters.
    pub fn line(&mut self, text: &str, max: usize) -> bool {
        let is_line = !text.contains(is_unprintable);
        if !self.bytes(text.len(), max) {
            return false;
        }
        self.require(
            is_line,
            text,
            "contains a control character, or one that is not seen",
        );
        is_line
    }

    /// Checks a text for one line that is not empty.
    pub fn word(&mut self, text: &str, max: usize) {
        match text {
            "" => self.add(Reason::Required),
            text => {
                self.line(text, max);
            }
        }
    }

    /// Checks annotations or details: names and values, a name once.
    pub fn labels(&mut self, field: Field, labels: &[(String, String)]) {
        self.each(field, labels, LABELS_MAX, |at, (key, value)| {
            at.field(Field::Key, |at| at.word(key, LABEL_KEY_BYTES_MAX));
            at.field(Field::Value, |at| {
                if at.bytes(value.len(), LABEL_VALUE_BYTES_MAX) {
                    at.require(!value.contains('\0'), value, "contains NUL");
                }
            });
        });
        if labels.len() <= LABELS_MAX {
            self.unique(field, labels.iter().map(|(key, _)| key.as_str()));
        }
    }

    pub fn dns_label(&mut self, text: &str) {
        self.require(is_dns_label(text), text, "is not a DNS label");
    }

    /// Checks a quantity of a driver: not negative, and bounded.
    pub fn quantity(&mut self, text: &str) {
        let rule = "is not a quantity such as 80Gi, 500m or 4";
        self.require(is_quantity(text), text, rule);
    }

    /// Checks a path of container edits.
    pub fn path(&mut self, path: &str) {
        if self.line(path, PATH_BYTES_MAX) {
            self.require(is_plain_path(path), path, "is not an absolute, plain path");
        }
    }
}

impl IntoIterator for Findings {
    type Item = Violation;
    type IntoIter = std::vec::IntoIter<Violation>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// All violations, with `; ` between them.
impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, violation) in self.0.iter().enumerate() {
            let between = if index > 0 { "; " } else { "" };
            write!(f, "{between}{violation}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Findings {}
