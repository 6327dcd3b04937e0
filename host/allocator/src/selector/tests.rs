use k8s_openapi::api::resource::v1::Device;
use nodedock_model::limit::EXPRESSION_BYTES_MAX;
use proptest::prelude::*;
use serde_json::json;

use super::{DeviceFacts, EvaluationError, STEPS_PER_EVALUATION, Selector, SelectorError, Steps};

fn facts() -> DeviceFacts {
    let device: Device = serde_json::from_value(json!({
        "name": "gpu-0",
        "allowMultipleAllocations": true,
        "attributes": {
            "model": {"string": "a100"},
            "index": {"int": 3},
            "healthy": {"bool": true},
            "version": {"version": "1.2.3"},
            "lanes": {"ints": [1, 2, 16]},
            "flags": {"bools": [true, false]},
            "tags": {"strings": ["fast", "big"]},
            "versions": {"versions": ["1.0.0", "2.0.0"]},
            "other.example.com/model": {"string": "b200"},
        },
        "capacity": {"memory": {"value": "80Gi"}, "other.example.com/cores": {"value": "1500m"}},
    }))
    .unwrap();
    DeviceFacts::new("gpu.example.com", &device)
}

/// The verdict of an expression. `a` is short for the driver's own attributes, `c` for its capacity.
fn verdict(expression: &str) -> Result<bool, EvaluationError> {
    let bound = format!(
        "cel.bind(a, device.attributes['gpu.example.com'], cel.bind(c, device.capacity['gpu.example.com'], {expression}))"
    );
    let selector =
        Selector::compile(&bound).unwrap_or_else(|error| panic!("{expression}: {error}"));
    selector.matches(&facts(), &mut Steps::new(STEPS_PER_EVALUATION))
}

fn refusal(expression: &str) -> String {
    match Selector::compile(expression) {
        Ok(_) => panic!("{expression} was compiled"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn selectors_that_choose_the_device() {
    for expression in [
        "device.driver == 'gpu.example.com' && device.allowMultipleAllocations",
        "a.model == 'a100' && device.attributes['other.example.com'].model == 'b200'",
        "a.index > 2 && a.index < 3.5 && a.index == 3u && a.healthy",
        "!has(a.nosuch) && !has(device.attributes['none'].model) && !('none' in device.attributes)",
        "has(a.model) && 'model' in a && a.?nosuch.orValue('x') == 'x' && a[?'model'].hasValue()",
        "a.version.isGreaterThan(semver('1.2.0')) && a.version.compareTo(semver('1.2.3')) == 0 && a.version.minor() == 2",
        "isSemver('v1.02', true) && !isSemver('v1.2') && semver('v01.2', true) == semver('1.2.0+build')",
        "c.memory.compareTo(quantity('81920Mi')) == 0 && c.memory == quantity('80Gi') && sign(c.memory) == 1",
        "device.capacity['other.example.com'].cores == quantity('1.5') && quantity('1000m').isInteger()",
        "quantity('1').add(quantity('500m')).sub(1) == quantity('0.5') && quantity('2k').asInteger() == 2000",
        "quantity('1500m').asApproximateFloat() == 1.5 && isQuantity('1Gi') && !isQuantity('1Zi')",
        "quantity('1').isLessThan(quantity('2')) && quantity('2') == quantity('1').add(1)",
        "a.lanes.includes(16) && a.tags.includes('fast') && a.model.includes('a100') && a.versions.includes(semver('1.0.0'))",
        "a.lanes.all(l, l > 0) && a.flags.exists(f, f) && a.lanes.exists_one(l, l == 2) && 16 in a.lanes",
        "a.lanes.filter(l, l > 1).map(l, l * 2) == [4, 32] && a.lanes.map(l, l > 1, l) == [2, 16]",
        "[3, 1, 2].max() == 3 && [3, 1].min() == 1 && [1, 2].sum() == 3 && [1, 2].isSorted() && [].sum() == 0",
        "[1, 2, 1].indexOf(1) == 0 && [1, 2, 1].lastIndexOf(1) == 2 && [1].indexOf(2) == -1",
        "sets.contains([1, 2], [2]) && sets.equivalent([1, 2], [2, 1, 1]) && !sets.intersects([1], [2])",
        "'hállo'.charAt(1) == 'á' && 'hállo'.substring(1, 3) == 'ál' && 'hállo'.indexOf('l') == 2 && 'é'.size() == 1",
        "'aXbX'.replace('X', '-', 1) == 'a-bX' && 'a,b'.split(',') == ['a', 'b'] && ['a', 'b'].join('-') == 'a-b'",
        "' x '.trim() == 'x' && 'aB'.lowerAscii() == 'ab' && 'aB'.upperAscii() == 'AB' && 'abab'.lastIndexOf('ab') == 2",
        r"a.model.matches('^a\\d+$') && 'x12y3'.findAll(r'\d+') == ['12', '3'] && 'x12'.find('[0-9]+') == '12'",
        "optional.of(1).optMap(x, x + 1).value() == 2 && optional.none().or(optional.of(2)).orValue(3) == 2",
        "optional.ofNonZeroValue('') == optional.none() && [1, ?optional.none()].size() == 1",
        "int('12') == 12 && string(1.5) == '1.5' && double(2) == 2.0 && bool('true') && uint(3) == 3u && type(1) == int",
        "1 + 2 * 3 == 7 && 7 % 4 == 3 && -7 / 2 == -3 && {'k': 1}.k == 1 && (true ? 1 : 2) == 1",
        // An error matters only if the other operand does not decide.
        "a.nosuch == 1 || true",
        "!(a.nosuch == 1 && false)",
        "[1, 2].exists(x, x / (x - 1) == 2)",
        "cel.bind(unused, 1 / 0, true)",
    ] {
        assert_eq!(verdict(expression), Ok(true), "{expression}");
    }
}

#[test]
fn selectors_without_a_verdict() {
    let no_key = |key: &str| EvaluationError::NoSuchKey {
        key: key.to_owned(),
    };
    for (expression, error) in [
        ("a.nosuch == 1", no_key("nosuch")),
        ("device.attributes['none'].model == 'x'", no_key("model")),
        ("c.nosuch.isInteger()", no_key("nosuch")),
        ("[1][1] == 1", no_key("1")),
        (
            "a.model > 1",
            EvaluationError::NoSuchOverload { function: "<" },
        ),
        (
            "a.index && true",
            EvaluationError::NoSuchOverload { function: "&&, ||" },
        ),
        (
            "a.model",
            EvaluationError::NoSuchOverload {
                function: "the selector",
            },
        ),
        (
            "a.version == '1.2.3'",
            EvaluationError::NoSuchOverload { function: "==" },
        ),
        ("1 / (a.index - 3) == 1", EvaluationError::DivisionByZero),
        (
            "9223372036854775807 + a.index == 1",
            EvaluationError::OutOfRange { function: "+" },
        ),
        (
            "semver(a.model).major() == 1",
            EvaluationError::NotConvertible {
                value: "a100".to_owned(),
                wanted: "semantic version",
            },
        ),
        (
            "int(a.model) == 1",
            EvaluationError::NotConvertible {
                value: "a100".to_owned(),
                wanted: "int",
            },
        ),
        ("optional.none().value() == 1", EvaluationError::NoValue),
        (
            "a.model.matches('(' + a.model)",
            EvaluationError::MalformedPattern {
                pattern: "(a100".to_owned(),
            },
        ),
        (
            "a.model.charAt(9) == ''",
            EvaluationError::OutOfRange { function: "charAt" },
        ),
    ] {
        assert_eq!(verdict(expression), Err(error), "{expression}");
    }
}

#[test]
fn malformed_attribute_prevents_a_verdict() {
    for (attributes, capacity) in [
        (json!({"v": {"version": "1"}}), json!({})),
        (json!({"v": {"versions": ["1.0.0", "x"]}}), json!({})),
        (json!({"v": {}}), json!({})),
        (json!({}), json!({"v": {"value": "1Zi"}})),
    ] {
        let device = json!({"name": "d", "attributes": attributes, "capacity": capacity});
        let facts = DeviceFacts::new("gpu.example.com", &serde_json::from_value(device).unwrap());
        let selector = Selector::compile("true").unwrap();
        let malformed = EvaluationError::MalformedDevice {
            name: "v".to_owned(),
        };
        assert_eq!(
            selector.matches(&facts, &mut Steps::new(10)),
            Err(malformed)
        );
    }
}

#[test]
fn expressions_that_are_refused_at_once() {
    for (expression, reason) in [
        (
            "device.nosuch == 1",
            "line 1, column 7: undefined field \"nosuch\" of device",
        ),
        (
            "true &&\n  device.driver > 1",
            "line 2, column 17: _>_ does not take (string, int)",
        ),
        (
            "device.driver",
            "line 1, column 7: the result is string, not bool",
        ),
        (
            "nosuch == 1",
            "line 1, column 1: undeclared reference to \"nosuch\"",
        ),
        ("nosuch(1)", "line 1, column 7: unknown function \"nosuch\""),
        (
            "ip('::1') == ip('::1')",
            "line 1, column 3: unknown function \"ip\"",
        ),
        (
            "'a'.size(1) == 1",
            "line 1, column 9: size does not take (string, int)",
        ),
        (
            "device.capacity['x'].y > 1",
            "line 1, column 24: _>_ does not take (quantity, int): use compareTo, isLessThan or isGreaterThan",
        ),
        (
            "device.capacity['x'].y.z == 1",
            "line 1, column 23: quantity has no field \"z\"",
        ),
        (
            "[1, 'a'] == []",
            "line 1, column 5: expected int, found string",
        ),
        (
            "[1, dyn('a')] == []",
            "line 1, column 8: the elements are int and dyn, not of one type",
        ),
        ("1 && true", "line 1, column 1: expected bool, found int"),
        (
            "'a'.all(x, true)",
            "line 1, column 1: string has no elements to go over",
        ),
        (
            "[1].all(x.y, true)",
            "line 1, column 10: the variable of a macro is a simple name",
        ),
        (
            "has(device)",
            "line 1, column 5: has() takes a selection of a field",
        ),
        (
            "'a'.matches('(')",
            "line 1, column 12: the regular expression \"(\" is malformed",
        ),
        ("int('a') == 1", "line 1, column 4: \"a\" is no int"),
        ("b'a' == b'a'", "line 1, column 1: bytes are not supported"),
        (
            "kubernetes.Quantity{} == 1",
            "line 1, column 20: undeclared reference to \"kubernetes.Quantity\"",
        ),
        (
            "optional.of(1).optFlatMap(x, x) == optional.none()",
            "line 1, column 26: optFlatMap takes an expression whose result is an optional",
        ),
        ("dyn(1).exists(x, x) + ", ""),
        ("", ""),
        ("'", ""),
        ("device.", ""),
        ("a b", ""),
        ("9223372036854775808 == 1", ""),
    ] {
        let refusal = refusal(expression);
        assert!(
            refusal.contains(reason) && refusal.starts_with("line "),
            "{expression}: {refusal}"
        );
    }
}

#[test]
fn an_attribute_alone_is_a_selector() {
    assert_eq!(verdict("a.healthy"), Ok(true));
    assert_eq!(
        Selector::compile("device.attributes['x'].y")
            .unwrap()
            .expression(),
        "device.attributes['x'].y"
    );
}

#[test]
fn expression_length_and_depth_are_bounded() {
    let long = format!("'{}' == ''", "x".repeat(EXPRESSION_BYTES_MAX));
    assert_eq!(
        Selector::compile(&long).unwrap_err(),
        SelectorError::TooLong { length: long.len() }
    );
    let chain = |part: &str| {
        format!(
            "1{} == 1",
            part.repeat((EXPRESSION_BYTES_MAX - 10) / part.len())
        )
    };
    for expression in [
        "(".repeat(10_000),
        format!("{}1{}", "(".repeat(5_000), ")".repeat(5_000)),
        format!("{}1{} == 1", "[".repeat(49), "]".repeat(49)),
        format!("{}1{} == 1", "{1:".repeat(2_000), "}".repeat(2_000)),
        chain("+1"),
        chain("==1"),
        chain(".a"),
        chain("[0]"),
        chain(".a(1)"),
        format!("{}true", "true?true:".repeat(1_000)),
        "- ".repeat(5_000),
    ] {
        let error = Selector::compile(&expression).unwrap_err();
        assert!(matches!(error, SelectorError::Malformed { .. }), "{error}");
    }
    assert!(Selector::compile(&format!("{}true{}", "(".repeat(40), ")".repeat(40))).is_ok());
    assert!(Selector::compile(&format!("true{}", "||true".repeat(1_600))).is_ok());
    assert!(Selector::compile(&format!("0{} == 0", "+1".repeat(90))).is_ok());
}

#[test]
fn types_and_regexes_are_bounded() {
    let mut doubling = "[] == []".to_owned();
    for number in (0..30).rev() {
        let (variable, previous) = (format!("v{number}"), format!("v{}", number - 1));
        let value = if number == 0 {
            "1".to_owned()
        } else {
            format!("{{{previous}: {previous}}}")
        };
        doubling = format!("cel.bind({variable}, {value}, {doubling})");
    }
    assert!(
        refusal(&doubling).ends_with("the types are too large"),
        "{}",
        refusal(&doubling)
    );
    let patterns = vec!["'a'.matches('(a{9}){9}')"; 33].join("||");
    assert!(refusal(&patterns).ends_with("more than 32 regular expressions"));
    assert!(refusal("'a'.matches('((a{100}){100}){100}')").ends_with("is malformed"));
}

/// Expressions that would run for long or allocate much.
fn hostile() -> Vec<String> {
    let list = format!("[{}1]", "1,".repeat(60));
    let mut loops = "true".to_owned();
    for number in 0..8 {
        loops = format!("{list}.all(v{number}, {loops})");
    }
    let mut texts = "v29 == ''".to_owned();
    let mut lists = "v29 == []".to_owned();
    let mut pairs = "v29 == v29".to_owned();
    for number in (0..30).rev() {
        let previous = format!("v{}", number - 1);
        let first = number == 0;
        let of = |zero: &str, form: &str| {
            if first {
                zero.to_owned()
            } else {
                form.replace('p', &previous)
            }
        };
        texts = format!(
            "cel.bind(v{number}, {}, {texts})",
            of("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'", "p+p")
        );
        lists = format!("cel.bind(v{number}, {}, {lists})", of("[1]", "p+p"));
        pairs = format!(
            "cel.bind(v{number}, {}, {pairs})",
            of("dyn([1])", "dyn([p,p])")
        );
    }
    let replaced = format!(
        "'{0}'.replace('', '{0}').replace('', '{0}').replace('', '{0}') == ''",
        "x".repeat(900)
    );
    let pattern = format!(
        "{list}.exists(x, {list}.exists(y, '{}'.matches('(x?){{60}}y')))",
        "x".repeat(64)
    );
    let joined = format!(
        "{list}.map(x, {list}.map(y, '{}').join('{0}')).join() == ''",
        "x".repeat(2_000)
    );
    let states = format!(
        "{list}.exists(x, '{}'.matches('(a|b)*a(a|b){{300}}c'))",
        "aababbabaabbab".repeat(60)
    );
    let mut cases = vec![
        loops, texts, lists, pairs, replaced, pattern, states, joined,
    ];
    // Short expressions over a long text, in loops that take few steps themselves.
    let mut long = "'xxxxxxxxxxxxxxxx'".to_owned();
    for _ in 0..9 {
        long = format!("cel.bind(d, {long}, d + d)");
    }
    let keys: String = (0..600).map(|number| format!("{number}: 1, ")).collect();
    for compared in [
        "[t, t].isSorted()",
        "'' != [t, t].min()",
        "'' != [t, t].max()",
        "'a'.indexOf(t) == -1",
        "'a'.lastIndexOf(t) == -1",
        "'a'.replace(t, t) == 'a'",
        "'a'.split(t) == ['a']",
        "!'a'.contains(t)",
        "t in texts",
        "texts[t] == 1",
        "versions[0].compareTo(versions[1]) == 0",
        "versions[0] == versions[1]",
        "keys.exists(k, true)",
    ] {
        let inner = format!("{list}.all(x, {list}.all(y, {compared}))");
        let inner = format!("cel.bind(keys, {{{keys} 0: 1}}, {inner})");
        let inner =
            format!("cel.bind(versions, [semver('1.0.0-' + t), semver('1.0.0-' + t)], {inner})");
        cases.push(format!(
            "cel.bind(t, {long}, cel.bind(texts, {{t: 1}}, {inner}))"
        ));
    }
    cases
}

#[test]
fn hostile_expression_runs_out_of_steps() {
    for expression in hostile() {
        let selector =
            Selector::compile(&expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
        let mut steps = Steps::new(STEPS_PER_EVALUATION);
        assert_eq!(
            selector.matches(&facts(), &mut steps),
            Err(EvaluationError::OutOfSteps),
            "{expression}"
        );
        assert_eq!(steps.left(), 0);
    }
}

#[test]
fn evaluation_consumes_its_steps() {
    let selector =
        Selector::compile("device.attributes['gpu.example.com'].model == 'a100'").unwrap();
    let mut steps = Steps::new(100);
    assert_eq!(selector.matches(&facts(), &mut steps), Ok(true));
    let taken = 100 - steps.left();
    assert!((5..20).contains(&taken), "{taken}");
    let mut exact = Steps::new(taken);
    assert_eq!(selector.matches(&facts(), &mut exact), Ok(true));
    let mut short = Steps::new(taken - 1);
    assert_eq!(
        selector.matches(&facts(), &mut short),
        Err(EvaluationError::OutOfSteps)
    );
}

/// Expressions of a grammar that knows most forms, without regard to types.
fn expressions() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        "true",
        "null",
        "0",
        "-1",
        "9223372036854775807",
        "7u",
        "1.5",
        "1e308",
        "'a'",
        "'é→'",
        "r'\\d'",
        "x",
        "y",
        "int",
        "[]",
        "{}",
        "device",
        "device.driver",
        "device.attributes",
        "device.capacity",
        "optional.none()",
        "device.attributes['gpu.example.com'].lanes",
        "device.attributes['gpu.example.com'].version",
        "device.capacity['gpu.example.com'].memory",
        "dyn('b')",
        "dyn(2)",
        "quantity('1')",
        "semver('1.0.0')",
    ])
    .prop_map(str::to_owned);
    leaf.prop_recursive(5, 40, 3, |inner| {
        let binary = prop::sample::select(vec![
            "+", "-", "*", "/", "%", "==", "!=", "<", ">=", "&&", "||", "in",
        ]);
        let member = prop::sample::select(vec![
            "size",
            "contains",
            "matches",
            "charAt",
            "indexOf",
            "lastIndexOf",
            "replace",
            "split",
            "substring",
            "join",
            "find",
            "findAll",
            "sum",
            "min",
            "isSorted",
            "includes",
            "first",
            "or",
            "orValue",
            "value",
            "add",
            "compareTo",
            "asInteger",
            "major",
            "lowerAscii",
        ]);
        let global = prop::sample::select(vec![
            "dyn",
            "int",
            "string",
            "double",
            "uint",
            "bool",
            "type",
            "size",
            "quantity",
            "semver",
            "optional.of",
            "sets.contains",
            "isSemver",
            "sign",
        ]);
        let macros = prop::sample::select(vec![
            "all",
            "exists",
            "exists_one",
            "map",
            "filter",
            "optMap",
            "optFlatMap",
        ]);
        let arguments = prop::collection::vec(inner.clone(), 0..4).prop_map(|it| it.join(", "));
        prop_oneof![
            (inner.clone(), binary, inner.clone()).prop_map(|(a, op, b)| format!("({a} {op} {b})")),
            (inner.clone(), member, arguments.clone())
                .prop_map(|(a, name, b)| format!("{a}.{name}({b})")),
            (global, arguments.clone()).prop_map(|(name, a)| format!("{name}({a})")),
            (inner.clone(), macros, inner.clone())
                .prop_map(|(a, name, b)| format!("{a}.{name}(x, {b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("cel.bind(y, {a}, {b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a}[{b}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a}[?{b}]")),
            (inner.clone(), inner.clone(), inner.clone())
                .prop_map(|(a, b, c)| format!("({a} ? {b} : {c})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{{{a}: {b}}}")),
            arguments.prop_map(|it| format!("[{it}]")),
            inner.clone().prop_map(|a| format!("{a}.model")),
            inner.clone().prop_map(|a| format!("has({a}.model)")),
            inner.clone().prop_map(|a| format!("dyn({a})")),
            inner.prop_map(|a| format!("!{a}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn no_expression_panics_or_exceeds_steps(expression in expressions(), limit in 0_u64..2_000) {
        for wrapped in [expression.clone(), format!("[dyn(0)].exists(x, cel.bind(y, dyn(1), dyn({expression})))")] {
            let Ok(selector) = Selector::compile(&wrapped) else { continue };
            let mut steps = Steps::new(limit);
            let first = selector.matches(&facts(), &mut steps);
            prop_assert!(steps.left() <= limit);
            let mut again = Steps::new(limit - steps.left());
            prop_assert_eq!(selector.matches(&facts(), &mut again), first);
            prop_assert_eq!(again.left(), 0);
        }
    }

    #[test]
    fn no_text_panics(text in prop_oneof![".{0,40}", r#"[(\[{}\])a1.'"?:,&|!<>=+*/%\\ -]{0,40}"#]) {
        let _ = Selector::compile(&text);
    }
}
