use proptest::prelude::*;
use regex::Regex;

use super::*;
use crate::{
    BindingConditions, Capacity, CapacityChoice, CapacityPolicy, NetworkData, UnparsedValue,
    quantity,
};

fn found(check: impl FnOnce(&mut Findings)) -> Vec<String> {
    let mut findings = Findings::default();
    check(&mut findings);
    findings.into_iter().map(|it| it.to_string()).collect()
}

#[test]
fn violations_have_paths_and_reasons() {
    let mut findings = Findings::default();
    findings.named(Field::Device, "a b", |at| {
        at.each(Field::Taints, &["x"], 1, |at, _| {
            taint(at, "", "v");
        });
    });
    let violation = findings.first().unwrap();
    let steps: Vec<_> = violation.path().map(Step::to_string).collect();
    assert_eq!(steps, ["device \"a b\"", "taints[0]", "key"]);
    assert_eq!(violation.field(), Some(Field::Key));
    assert!(matches!(&violation.reason, Reason::Invalid { value, .. } if value.is_empty()));
}

#[test]
fn violations_and_values_are_bounded() {
    let long = "x\n".repeat(10_000);
    let lines = found(|findings| {
        for _ in 0..1000 {
            findings.require(false, &long, "is wrong");
        }
    });
    assert_eq!(lines.len(), VIOLATIONS_MAX);
    assert!(lines[0].len() < 200, "{}", lines[0]);
}

#[test]
fn binding_conditions_come_in_two_lists() {
    let binding = |conditions: &[&str], failures: &[&str]| {
        let texts = |types: &[&str]| types.iter().map(|kind| (*kind).to_owned()).collect();
        let binding = BindingConditions {
            conditions: texts(conditions),
            failures: texts(failures),
        };
        found(|findings| binding_conditions(findings, &binding)).join("; ")
    };
    let long = "x".repeat(64);
    for (conditions, failures, part) in [
        (
            &["A", "B", "C", "D", "E"][..],
            &["F"][..],
            "5 binding-conditions, at most 4",
        ),
        (
            &["A"],
            &["B", "C", "D", "E", "F"],
            "5 binding-failure-conditions, at most 4",
        ),
        (&["A"], &[], "need failure conditions"),
        (&[], &["A"], "need binding conditions"),
        (
            &["A", "A"],
            &["B"],
            "binding-conditions[1]: \"A\" occurs twice",
        ),
        (&["A"], &["A"], "is one of the binding conditions too"),
        (&["a b"], &["B"], "\"a b\" is no type"),
        (&[""], &["B"], "\"\" is no type"),
        (&[&long], &["B"], "is no type"),
        (&["A"], &["example.com/"], "is no type"),
    ] {
        let text = binding(conditions, failures);
        assert!(text.contains(part), "{conditions:?} {failures:?}: {text}");
    }
    assert_eq!(binding(&[], &[]), "");
    assert_eq!(
        binding(&["A", "example.com/b"], &["E", "example.com/h"]),
        ""
    );
}

#[test]
fn a_policy_fits_the_capacity() {
    let policy = |default: Option<&str>, choice: CapacityChoice| {
        let policy = Some(CapacityPolicy {
            default_amount: default.map(str::to_owned),
            choice,
        });
        let value = "8Gi".to_owned();
        found(|findings| capacity(findings, &Capacity { value, policy }, true))
    };
    let values =
        |values: &[&str]| CapacityChoice::Values(values.iter().map(ToString::to_string).collect());
    let range = |min: &str, max: Option<&str>, step: Option<&str>| CapacityChoice::Range {
        min: min.to_owned(),
        max: max.map(str::to_owned),
        step: step.map(str::to_owned),
    };
    assert_eq!(policy(None, CapacityChoice::Any), [""; 0]);
    assert_eq!(policy(None, values(&[])), [""; 0]);
    assert_eq!(policy(Some("1Gi"), values(&["1Gi", "8Gi"])), [""; 0]);
    let whole = range("1Gi", Some("8Gi"), Some("1Gi"));
    assert_eq!(policy(Some("2Gi"), whole.clone()), [""; 0]);
    assert_eq!(policy(None, whole), ["policy: default-amount is empty"]);
    for (choice, parts) in [
        (
            values(&["2Gi", "1Gi"]),
            &["values[1] \"1Gi\" is less than the value before: 2Gi"][..],
        ),
        (
            values(&["1Gi", "9Gi"]),
            &[
                "values[1] \"9Gi\" is more than the capacity 8Gi",
                "none of the values",
            ],
        ),
        (
            values(&["2Gi", "2048Mi"]),
            &["values[1]: \"2147483648\" occurs twice"],
        ),
        (
            values(&["1Gi"]),
            &["is the default amount, but none of the values"],
        ),
        (range("", None, None), &["range: min is empty"]),
        (
            range("9Gi", None, None),
            &["more than the capacity", "and less than 9Gi"],
        ),
        (
            range("1Gi", Some("1Gi"), None),
            &["max \"2Gi\" is the default amount, and more than 1Gi"],
        ),
        (
            range("1Gi", None, Some("8Gi")),
            &["beyond the capacity", "no whole number of steps"],
        ),
        (range("1Gi", None, Some("0")), &["no whole number of steps"]),
    ] {
        let lines = policy(Some("2Gi"), choice.clone());
        assert_eq!(lines.len(), parts.len(), "{choice:?}: {lines:#?}");
        for (line, part) in lines.iter().zip(parts) {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
}

/// The rules as Kubernetes has them in its sources, to compare with.
mod kubernetes {
    pub(super) const LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
    pub(super) const KEY: &str = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$";
    pub(super) const VALUE: &str = "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$";
    pub(super) const REASON: &str = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$";
    pub(super) const VERSION: &str = r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-(0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*))*)?(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?$";
}

fn is(pattern: &str, text: &str) -> bool {
    Regex::new(pattern).unwrap().is_match(text)
}

fn is_accepted(check: impl FnOnce(&mut Findings)) -> bool {
    found(check).is_empty()
}

fn any_word() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-zA-Z0-9_./:,-]{0,8}",
        "[a-z0-9.-]{0,6}/?[a-zA-Z0-9_.-]{1,66}",
        "[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}(-[a-z0-9.]{1,4})?(\\+[a-z0-9.-]{1,4})?",
        "\\PC{0,6}",
    ]
}

fn any_amount() -> impl Strategy<Value = String> {
    (
        0..12u32,
        proptest::sample::select(&["", "Gi", "m", "00m"][..]),
    )
        .prop_map(|(number, suffix)| format!("{number}{suffix}"))
}

proptest! {
    #[test]
    fn kubernetes_accepts_what_checks_accept(text in any_word(), value in any_word()) {
        let at_63 = |text: &str| text.rsplit('/').next().is_some_and(|name| name.len() <= 63);
        if is_accepted(|at| taint(at, &text, &value)) {
            prop_assert!(is(kubernetes::KEY, &text) && at_63(&text), "{text}");
            prop_assert!(is(kubernetes::VALUE, &value) && value.len() <= 63, "{value}");
        }
        if is_accepted(|at| condition_reason(at, &text)) {
            prop_assert!(is(kubernetes::REASON, &text), "{text}");
        }
        if is_accepted(|at| condition_type(at, &text)) {
            prop_assert!(is(kubernetes::KEY, &text) && at_63(&text), "{text}");
        }
        if is_accepted(|at| counter_set(at, (Field::Name, &text), [value.as_str()].into_iter())) {
            for name in [&text, &value] {
                prop_assert!(is(kubernetes::LABEL, name) && name.len() <= 63, "{name}");
            }
        }
        if is_accepted(|at| attribute(at, &UnparsedValue::Version(text.clone()))) {
            prop_assert!(is(kubernetes::VERSION, &text) && text.len() <= 64, "{text}");
        }
        if is_accepted(|at| attribute(at, &UnparsedValue::Texts(vec![text.clone(), value.clone()]))) {
            prop_assert!(text.len() <= 64 && value.len() <= 64);
        }
    }

    #[test]
    fn accepted_values_have_the_default(
        whole in any_amount(), default in any_amount(), values in prop::collection::vec(any_amount(), 1..12),
    ) {
        let nanos = |text: &String| quantity::nanos(text).unwrap();
        let amounts: Vec<_> = values.iter().map(nanos).collect();
        let policy = CapacityPolicy { default_amount: Some(default.clone()), choice: CapacityChoice::Values(values) };
        let capacity = Capacity { value: whole.clone(), policy: Some(policy) };
        if is_accepted(|at| super::capacity(at, &capacity, true)) {
            prop_assert!(amounts.len() <= 10 && amounts.contains(&nanos(&default)));
            prop_assert!(amounts.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(amounts.iter().all(|amount| *amount <= nanos(&whole)));
        }
        prop_assert!(!is_accepted(|at| super::capacity(at, &capacity, false)));
    }

    #[test]
    fn accepted_ranges_have_the_default(
        [whole, default, min] in [any_amount(), any_amount(), any_amount()],
        max in prop::option::of(any_amount()),
    ) {
        let nanos = |text: &String| quantity::nanos(text).unwrap();
        let choice = CapacityChoice::Range { min: min.clone(), max: max.clone(), step: None };
        let policy = Some(CapacityPolicy { default_amount: Some(default.clone()), choice });
        let capacity = Capacity { value: whole.clone(), policy };
        if is_accepted(|at| super::capacity(at, &capacity, true)) {
            let (whole, default, min) = (nanos(&whole), nanos(&default), nanos(&min));
            prop_assert!(min <= whole && min <= default);
            let max = max.as_ref().map(nanos);
            prop_assert!(max.is_none_or(|max| default <= max && max <= whole));
        }
    }

    #[test]
    fn accepted_addresses_are_canonical(
        address in "[0-9a-fA-F:.]{1,14}|[0-9]{1,3}\\.0\\.2\\.[0-9]{1,2}|2001:[dD]b8::[0-9a-f]{1,4}|::ffff:1\\.2\\.3\\.4",
        length in "[0-9]{0,3}|\\+8",
    ) {
        let ip = format!("{address}/{length}");
        let data = NetworkData { ips: vec![ip.clone()], interface_name: String::new(), hardware_address: String::new() };
        let parsed = address.parse::<std::net::IpAddr>().ok().filter(|it| it.to_canonical() == *it);
        let accepted = is_accepted(|at| network(at, &data));
        if accepted {
            prop_assert_eq!(ip, format!("{}/{}", parsed.unwrap(), length.parse::<u8>().unwrap()));
        }
    }
}
