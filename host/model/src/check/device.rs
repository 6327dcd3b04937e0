//! Parts of a device in a ResourceSlice.

use std::cmp::Ordering;

use super::{Field, Findings, Reason, Step};
use crate::limit::{
    ATTRIBUTE_TEXT_MAX, ATTRIBUTE_VALUES_MAX, ATTRIBUTES_MAX, BINDING_CONDITIONS_MAX, COUNTERS_MAX,
    POLICY_VALUES_MAX,
};
use crate::{
    BindingConditions, Capacity, CapacityChoice, CapacityPolicy, UnparsedValue, is_dns_label,
    is_label_key, is_label_value, quantity,
};

const NANOS: i128 = 1_000_000_000;
const NOT_A_LABEL_KEY: &str = "is not a label key such as example.com/broken: a name of at most 63 letters, digits, '-', '_' and '.', \
     after a DNS subdomain and '/' if it has one";

/// Checks the number of attributes and capacities of a device.
pub fn attribute_count(findings: &mut Findings, count: usize) -> bool {
    findings.at_most(Field::AttributesAndCapacities, count, ATTRIBUTES_MAX)
}

/// Checks the number of values of all attributes of a device, each entry of a list counted.
pub fn attribute_values(findings: &mut Findings, count: usize) {
    findings.at_most(Field::AttributeValues, count, ATTRIBUTE_VALUES_MAX);
}

/// Checks the value of an attribute.
pub fn attribute(findings: &mut Findings, value: &UnparsedValue) {
    let field = match value {
        UnparsedValue::Int(_) | UnparsedValue::Bool(_) => return,
        UnparsedValue::Text(text) => return findings.field(Field::Text, |at| is_short(at, text)),
        UnparsedValue::Version(text) => {
            return findings.field(Field::Version, |at| version(at, text));
        }
        UnparsedValue::Ints(_) => Field::Ints,
        UnparsedValue::Bools(_) => Field::Booleans,
        UnparsedValue::Texts(texts) => {
            findings.each(Field::Texts, texts, usize::MAX, |at, text| {
                is_short(at, text);
            });
            Field::Texts
        }
        UnparsedValue::Versions(texts) => {
            findings.each(Field::Versions, texts, usize::MAX, |at, text| {
                version(at, text);
            });
            Field::Versions
        }
    };
    let is_empty = value.count() == 0;
    findings.field(field, |at| at.require(!is_empty, "", "is an empty list"));
}

fn is_short(findings: &mut Findings, text: &str) {
    findings.bytes(text.len(), ATTRIBUTE_TEXT_MAX);
}

fn version(findings: &mut Findings, text: &str) {
    if !findings.bytes(text.len(), ATTRIBUTE_TEXT_MAX) {
        return;
    }
    if let Err(error) = semver::Version::parse(text) {
        let rule = format!("is not a semantic version: {error}");
        findings.require(false, text, &rule);
    }
}

/// Checks key and value of a taint.
pub fn taint(findings: &mut Findings, key: &str, value: &str) {
    findings.field(Field::Key, |at| {
        at.require(is_label_key(key), key, NOT_A_LABEL_KEY);
    });
    let rule = "is not a label value: at most 63 letters, digits, '-', '_' and '.', with a letter or digit at its ends";
    findings.field(Field::Value, |at| {
        at.require(is_label_value(value), value, rule);
    });
}

/// Checks a counter set, or what a device consumes of one. `name` is the field with its name.
pub fn counter_set<'a>(
    findings: &mut Findings,
    (field, name): (Field, &str),
    counters: impl ExactSizeIterator<Item = &'a str>,
) {
    findings.field(field, |at| match name {
        "" => at.add(Reason::Required),
        name => at.dns_label(name),
    });
    let count = counters.len();
    if count == 0 {
        findings.add_at(Field::Counters, Reason::Required);
    } else if findings.at_most(Field::Counters, count, COUNTERS_MAX) {
        findings.field(Field::Counters, |at| {
            counters
                .filter(|counter| !is_dns_label(counter))
                .for_each(|counter| at.dns_label(counter));
        });
    }
}

/// Checks binding conditions of a device: two lists of types of conditions, of which none or both are empty (KEP-5007).
pub fn binding_conditions(findings: &mut Findings, binding: &BindingConditions) {
    let (conditions, failures) = (&binding.conditions, &binding.failures);
    let lists = [
        (Field::BindingConditions, conditions),
        (Field::BindingFailureConditions, failures),
    ];
    for (field, types) in lists {
        findings.each(field, types, BINDING_CONDITIONS_MAX, |at, kind| {
            at.require(
                is_label_key(kind),
                kind,
                "is no type of a condition, such as example.com/attached",
            );
        });
    }
    for (field, types) in lists {
        findings.unique(field, types.iter().map(String::as_str));
    }
    for (index, kind) in failures.iter().enumerate() {
        if conditions.contains(kind) {
            let step = Step::Entry(Field::BindingFailureConditions, index);
            findings.at(
                || step,
                |at| at.require(false, kind, "is one of the binding conditions too"),
            );
        }
    }
    let [(of_conditions, _), (of_failures, _)] = lists;
    for (missing, is_missing, rule) in [
        (
            of_conditions,
            conditions.is_empty() && !failures.is_empty(),
            "failure conditions need binding conditions",
        ),
        (
            of_failures,
            failures.is_empty() && !conditions.is_empty(),
            "binding conditions need failure conditions",
        ),
    ] {
        if is_missing {
            findings.field(missing, |at| at.inconsistent(rule));
        }
    }
}

/// Checks the request policy of a capacity; `is_shared`: several claims can have the device. Amounts that are no quantities, and an empty
/// `min` of a range, are as good as missing.
pub fn capacity(findings: &mut Findings, capacity: &Capacity, is_shared: bool) {
    let Some(policy) = &capacity.policy else {
        return;
    };
    findings.field(Field::Policy, |at| match is_shared {
        true => request_policy(at, policy, &Amount::of(&capacity.value)),
        false => at.add(Reason::Forbidden(
            "it is for devices that allow several allocations",
        )),
    });
}

fn request_policy(findings: &mut Findings, policy: &CapacityPolicy, whole: &Amount<'_>) {
    let is_chosen = match &policy.choice {
        CapacityChoice::Any => false,
        CapacityChoice::Values(values) => !values.is_empty(),
        CapacityChoice::Range { .. } => true,
    };
    if !is_chosen {
        return;
    }
    let Some(default) = policy.default_amount.as_deref().map(Amount::of) else {
        return findings.add_at(Field::DefaultAmount, Reason::Required);
    };
    match &policy.choice {
        CapacityChoice::Any => {}
        CapacityChoice::Values(values) => one_of(findings, values, whole, &default),
        CapacityChoice::Range { min, max, step } => findings.field(Field::Range, |at| {
            let [max, step] = [max, step].map(|amount| amount.as_deref().map(Amount::of));
            match min.as_str() {
                "" => at.add_at(Field::Min, Reason::Required),
                min => Range {
                    min: Amount::of(min),
                    max,
                    step,
                }
                .check(at, whole, &default),
            }
        }),
    }
}

/// A quantity, and how it was written.
#[derive(Clone, Copy)]
struct Amount<'a> {
    text: &'a str,
    /// A quantity out of range counts as none.
    nanos: i128,
}

impl<'a> Amount<'a> {
    fn of(text: &'a str) -> Self {
        let nanos = quantity::nanos(text).unwrap_or(0);
        Self { text, nanos }
    }

    /// Returns whole units, rounded up.
    fn units(&self) -> i128 {
        self.nanos.div_euclid(NANOS) + i128::from(self.nanos.rem_euclid(NANOS) != 0)
    }

    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }

    /// Adds a violation of this amount.
    fn refuse(&self, findings: &mut Findings, is_wrong: bool, why: &str, other: &Self) {
        findings.require(!is_wrong, self.text, &format!("{why} {}", other.text));
    }
}

fn one_of(findings: &mut Findings, values: &[String], whole: &Amount<'_>, default: &Amount<'_>) {
    let amounts: Vec<_> = values.iter().map(|value| Amount::of(value)).collect();
    if amounts.len() <= POLICY_VALUES_MAX {
        for (index, pair) in amounts.windows(2).enumerate() {
            let step = || Step::Entry(Field::Values, index + 1);
            let is_less = pair[1].cmp(&pair[0]).is_lt();
            findings.at(step, |at| {
                pair[1].refuse(at, is_less, "is less than the value before:", &pair[0]);
            });
        }
    }
    findings.each(Field::Values, &amounts, POLICY_VALUES_MAX, |at, amount| {
        let is_more = amount.cmp(whole).is_gt();
        amount.refuse(at, is_more, "is more than the capacity", whole);
    });
    if amounts.len() <= POLICY_VALUES_MAX {
        let units: Vec<_> = amounts.iter().map(|it| it.units().to_string()).collect();
        findings.unique(Field::Values, units.iter().map(String::as_str));
    }
    let has_default = amounts.iter().any(|amount| amount.cmp(default).is_eq());
    findings.field(Field::Values, |at| {
        let rule = "is the default amount, but none of the values";
        at.require(has_default, default.text, rule);
    });
}

struct Range<'a> {
    min: Amount<'a>,
    max: Option<Amount<'a>>,
    step: Option<Amount<'a>>,
}

impl Range<'_> {
    fn check(&self, findings: &mut Findings, whole: &Amount<'_>, default: &Amount<'_>) {
        let min = &self.min;
        findings.field(Field::Min, |at| {
            let (large, low) = (min.cmp(whole).is_gt(), default.cmp(min).is_lt());
            min.refuse(at, large, "is more than the capacity", whole);
            default.refuse(at, low, "is the default amount, and less than", min);
        });
        if let Some(max) = &self.max {
            findings.field(Field::Max, |at| {
                let (crossed, large) = (min.cmp(max).is_gt(), max.cmp(whole).is_gt());
                min.refuse(at, crossed, "is the minimum, and more than", max);
                max.refuse(at, large, "is more than the capacity", whole);
                let high = default.cmp(max).is_gt();
                default.refuse(at, high, "is the default amount, and more than", max);
            });
        }
        if let Some(step) = &self.step {
            findings.field(Field::Step, |at| self.steps(at, step, whole, default));
        }
    }

    /// The default and the maximum are a whole number of steps from the minimum.
    fn steps(
        &self,
        findings: &mut Findings,
        step: &Amount<'_>,
        whole: &Amount<'_>,
        default: &Amount<'_>,
    ) {
        let min = &self.min;
        let is_beyond = min.nanos.saturating_add(step.nanos) > whole.nanos;
        step.refuse(
            findings,
            is_beyond,
            "from the minimum leads beyond the capacity",
            whole,
        );
        for value in [Some(default), self.max.as_ref()].into_iter().flatten() {
            let rest = value
                .units()
                .saturating_sub(min.units())
                .checked_rem(step.units());
            // A step of nothing leads nowhere.
            let is_between = rest != Some(0);
            value.refuse(
                findings,
                is_between,
                "is no whole number of steps from",
                min,
            );
        }
    }
}
