//! Compares the selectors with the scheduler's own, on generated expressions and devices.
//! `NODEDOCK_ORACLE_CASES` and `NODEDOCK_ORACLE_SEED` set another number of them, and another seed:
//!
//! ```sh
//! NODEDOCK_ORACLE_CASES=100000 cargo test --workspace --features nodedock/failpoints --test interop -- selectors
//! ```

use std::collections::HashSet;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use nodedock_allocator::selector::{DeviceFacts, STEPS_PER_EVALUATION, Selector, Steps};
use nodedock_tests::machine::or_skip;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use serde_json::{Value, json};

mod generator;

use generator::{Generator, device};

use crate::programs;

/// Expressions on which the two once disagreed, or nearly did.
const FIXED: &[&str] = &[
    "true",
    "string(1000000.0) == '1e+06'",
    "string(123456789.0) == '1.23456789e+08'",
    "string(0.0001) == '0.0001'",
    "string(0.00001) == '1e-05'",
    "cel.bind(x, 1/0, true)",
    "device.nosuch",
    "device.driver > 1",
    "device.attributes['none'].model == 'x'",
    "has(device.attributes.none)",
    "'none' in device.attributes",
    "(1/0 == 1) in []",
    "type(device.attributes['gpu.example.com'].model) in [int, string]",
    "device.attributes['gpu.example.com'].version == '1.2.3'",
    "device.attributes['gpu.example.com'].version != '1.2.3'",
    "'1.2.3' == device.attributes['gpu.example.com'].version",
    "[1, device.attributes['gpu.example.com'].index] == [1, 2]",
    "int('x') == 1",
    "quantity('x') == quantity('1')",
    "'a'.matches('(')",
    "dyn(device).nosuch == 1",
    "dyn(device)['driver'] == 'gpu.example.com'",
    "device['driver'] == 'x'",
    "size(dyn(device)) == 4",
    "device.capacity['gpu.example.com'].memory.sign() == 1",
    "[].exists(x, x.foo)",
    "{}.all(x, x == 1)",
    "[[]].exists(x, x == [1])",
    "!!true",
    "--1 == 1",
    "- -1 == 1",
    "1u - 2u == 0u",
    "1 == 1.0",
    "1 == 1u",
    "dyn(1) == 1.0",
    "type(1) == int",
    "type(type(1)) == type",
    "[int, string] == []",
    "{1: 2, 1: 3} == {}",
    ".device.driver == 'gpu.example.com'",
    "optional.of(1) == optional.none()",
    "[1][0.0] == 1",
    "[1][dyn(0.0)] == 1",
    "{1: 'a'}[dyn(1.0)] == 'a'",
    "null == device.capacity['gpu.example.com'].memory",
    "[1].existsOne(x, true)",
    "string(100000.0) == '100000'",
    "{1: 2, 1: 3} == {1: 3}",
    "[null] == [1]",
    "device.attributes['gpu.example.com'].lanes.all(x, x > 0)",
    "device.attributes['gpu.example.com'].tags.includes('fast')",
    "device.attributes['gpu.example.com'].model.includes('a100')",
    "['a', 'b'].sum() == 'ab'",
    "[1.5, 2.5].sum() == 4.0",
    "[].sum() == 0",
    "dyn([1.5]).sum() == 1.5",
    "[dyn(1), ?optional.of(1).optMap(x, x)] == []",
    "device.attributes['none'].model in dyn([])",
    "device.attributes['none'].model in []",
    "string(dyn({'a': 1})) == ''",
    "string({'a': [1]}) == ''",
    "'a'.matches('a**')",
    "'a'.matches('a{1001}')",
    "'aab'.matches('^a{2,}?b+?c??$')",
    "'[&~'.matches('^[[&~]+$')",
    r"'\u0663'.matches('\\d')",
    "'x'.find('(') == ''",
    "dyn(1).exists(x, true)",
    "[1, 2].map(x, x == 1, x).size() == 1",
    "{'a': 1, ?'b': optional.none()} == {'a': 1}",
    "cel.bind(x, {'a': 1}, x.?a.orValue(2) == 1 && x[?'b'].orValue(2) == 2)",
    "semver('1.0.0+a') == semver('1.0.0+b')",
    "'b' > 'a' && false < true",
    "-9223372036854775808 == int('-9223372036854775808')",
    "-(-9223372036854775808) == 0",
    "1.0 / 0.0 > 1.0",
    "0.0 / 0.0 == 0.0 / 0.0",
    "int(1e30) == 0",
    "uint(-1) == 0u",
    "double('1e999') == 1.0",
    "'a' in {'a': 1} && !('b' in {'a': 1})",
    "optional.of(null).hasValue()",
    "optional.ofNonZeroValue(quantity('0')).hasValue()",
    "[optional.of(1), optional.none()].unwrapOpt() == [1]",
    "optional.unwrap([optional.of(1)]) == [1]",
    "device.attributes['gpu.example.com'].lanes[?9].orValue(7) == 7",
    "matches('abc', 'b')",
    "device.attributes.exists(d, d == 'other.example.com')",
    "device.attributes['gpu.example.com'].all(n, n != 'x')",
];

#[test]
fn selectors_agree_with_the_scheduler() {
    let Some(program) = or_skip(
        "selectors, by the scheduler's library",
        programs::go("cel-oracle"),
    ) else {
        return;
    };
    let number =
        |name: &str, default: u64| std::env::var(name).map_or(default, |it| it.parse().unwrap());
    let (count, seed) = (
        number("NODEDOCK_ORACLE_CASES", 2_000),
        number("NODEDOCK_ORACLE_SEED", 1),
    );
    println!("{count} cases of seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut cases: Vec<Value> = FIXED
        .iter()
        .map(|it| json!({"expression": it, "driver": DRIVER, "device": fixed_device()}))
        .collect();
    for _ in 0..count {
        let expression = Generator {
            random: &mut random,
            variables: Vec::new(),
        }
        .selector();
        let device = device(&mut random);
        cases.push(json!({"expression": expression, "driver": DRIVER, "device": device}));
    }
    let verdicts = ask(&program, &cases);
    assert_eq!(verdicts.len(), cases.len());
    let (mut differences, mut kinds) = (Vec::new(), [0_usize; 4]);
    for (case, theirs) in cases.iter().zip(&verdicts) {
        let (ours, reason) = verdict(case);
        let theirs_short = match (&theirs["compiles"], &theirs["matches"]) {
            (Value::Bool(false), _) => "refused",
            (_, Value::Null) => "failed",
            (_, matches) => {
                if matches == &json!(true) {
                    "true"
                } else {
                    "false"
                }
            }
        };
        kinds[["refused", "failed", "true", "false"]
            .iter()
            .position(|it| *it == theirs_short)
            .unwrap()] += 1;
        if ours != theirs_short && !is_accepted(ours, &reason, theirs) {
            differences.push(format!(
                "{}\n  ours {ours} ({reason})\n  theirs {theirs_short} ({}{})\n  {}",
                case["expression"].as_str().unwrap(),
                theirs["error"].as_str().unwrap_or(""),
                theirs["evaluationError"].as_str().unwrap_or(""),
                case["device"],
            ));
        }
    }
    println!("refused, failed, true, false: {kinds:?}");
    let least = cases.len() * VERDICT_PERCENT_MIN / 100;
    assert!(
        kinds.iter().all(|count| *count >= least),
        "each verdict occurs: {kinds:?} of {}",
        cases.len()
    );
    assert!(
        differences.is_empty(),
        "{} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

const DRIVER: &str = "gpu.example.com";

/// Minimum number of expressions with each verdict in a hundred.
const VERDICT_PERCENT_MIN: usize = 2;

/// Returns whether a difference is an accepted one. The scheduler panics on an optional element of unknown type, knows no variable whose
/// value is a type, refuses a literal as index that can be none, fails on a version in `in` with a list of literals, and takes a list as
/// key of a map. It looks at the first element of a list of unknown type before it compares them.
fn is_accepted(ours: &str, reason: &str, theirs: &Value) -> bool {
    let contains = |name: &str, parts: &[&str]| {
        theirs[name]
            .as_str()
            .is_some_and(|text| parts.iter().any(|part| text.contains(part)))
    };
    let overloads = ["isSorted", "min", "max"].map(|it| format!("no such overload: {it}("));
    contains(
        "error",
        &[
            "panic:",
            "reference to undefined type",
            "invalid qualifier type",
        ],
    ) || (ours != "refused" && contains("evaluationError", &["unhashable"]))
        || (ours != "refused"
            && contains("evaluationError", &overloads.each_ref().map(String::as_str)))
        || reason.ends_with("a key of a map")
}

fn ask(program: &Path, cases: &[Value]) -> Vec<Value> {
    let mut oracle = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the oracle starts");
    let mut input = oracle.stdin.take().unwrap();
    let lines: String = cases.iter().map(|case| format!("{case}\n")).collect();
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = oracle.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn verdict(case: &Value) -> (&'static str, String) {
    let selector = match Selector::compile(case["expression"].as_str().unwrap()) {
        Ok(selector) => selector,
        Err(error) => return ("refused", error.to_string()),
    };
    let device = serde_json::from_value(case["device"].clone()).unwrap();
    let facts = DeviceFacts::new(DRIVER, &device);
    match selector.matches(&facts, &mut Steps::new(STEPS_PER_EVALUATION)) {
        Ok(true) => ("true", String::new()),
        Ok(false) => ("false", String::new()),
        Err(error) => ("failed", error.to_string()),
    }
}

fn fixed_device() -> Value {
    json!({
        "name": "gpu-0",
        "attributes": {
            "model": {"string": "a100"},
            "index": {"int": 3},
            "healthy": {"bool": true},
            "version": {"version": "1.2.3"},
            "other.example.com/model": {"string": "b200"},
            "lanes": {"ints": [1, 2, 16]},
            "tags": {"strings": ["fast", "big"]},
        },
        "capacity": {"memory": {"value": "80Gi"}, "other.example.com/cores": {"value": "1500m"}},
    })
}

#[test]
fn generated_expressions_are_diverse() {
    let mut random = StdRng::seed_from_u64(7);
    let made: HashSet<String> = (0..500)
        .map(|_| {
            Generator {
                random: &mut random,
                variables: Vec::new(),
            }
            .selector()
        })
        .collect();
    assert!(made.len() > 400, "{}", made.len());
}
