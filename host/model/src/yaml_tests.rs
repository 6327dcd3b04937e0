use serde_json::json;

use super::*;

fn value(text: &str) -> Result<Value, String> {
    let documents = documents(&format!("a: {text}\n")).map_err(|error| error.to_string())?;
    let [document] = &documents[..] else {
        panic!("{documents:?}")
    };
    Ok(document["a"].clone())
}

/// The values are those of kubectl 1.36; the suite `interop` compares them with it.
#[test]
fn scalars_are_those_of_go() {
    for (text, expected) in [
        ("0755", json!(493)),
        ("0400", json!(256)),
        ("-0755", json!(-493)),
        ("8080.0", json!(8080)),
        ("1e3", json!(1000)),
        ("3.0e+2", json!(300)),
        (".5", json!(0.5)),
        ("5.", json!(5)),
        ("-2.0", json!(-2)),
        ("-0.0", json!(0)),
        ("0o17", json!(15)),
        ("+0o17", json!(15)),
        ("0x1F", json!(31)),
        ("-0x1F", json!(-31)),
        ("0x_1F", json!(31)),
        ("0b101", json!(5)),
        ("1_000", json!(1000)),
        ("1__0", json!(10)),
        ("1_", json!(1)),
        ("1_000.5", json!(1000.5)),
        ("_1", json!("_1")),
        ("089", json!(89)),
        ("1.5", json!(1.5)),
        ("1e400", json!("1e400")),
        ("1e21", json!(1e21)),
        ("9223372036854775807", json!(i64::MAX)),
        ("-9223372036854775808", json!(i64::MIN)),
        ("9223372036854775808", json!(9_223_372_036_854_775_808.0)),
        (
            "0777777777777777777777777",
            json!(777_777_777_777_777_777_777_777.0),
        ),
        ("+-1", json!("+-1")),
        ("0x", json!("0x")),
        ("0o8", json!("0o8")),
        ("1:30", json!("1:30")),
        ("1Gi", json!("1Gi")),
        (".", json!(".")),
        ("2001-01-01", json!("2001-01-01")),
        ("\"0755\"", json!("0755")),
        ("! 12", json!("12")),
        ("!!str 1", json!("1")),
        ("!!int '1'", json!(1)),
        ("!!bool 'yes'", json!(true)),
        ("!other 1", json!("1")),
        ("yes", json!(true)),
        ("y", json!(true)),
        ("off", json!(false)),
        ("yEs", json!("yEs")),
        ("~", json!(null)),
        ("Null", json!(null)),
        ("nULL", json!("nULL")),
        (".iNf", json!(".iNf")),
        ("inf", json!("inf")),
    ] {
        assert_eq!(value(text), Ok(expected), "{text}");
    }
    for (text, expected) in [
        (".inf", "JSON has no number .inf"),
        ("!!int x", "\"x\" is no int"),
        ("!!bool 1", "\"1\" is no bool"),
        ("!!binary aGk=", "!!binary is not supported"),
    ] {
        let error = value(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn keys_are_texts_of_their_values() {
    for (text, expected) in [
        ("{on: x}", json!({ "true": "x" })),
        ("{0755: x}", json!({ "493": "x" })),
        ("{1.5: x, 1e3: z}", json!({ "1.5": "x", "1000": "z" })),
        ("{'on': x, ? b}", json!({ "on": "x", "b": null })),
        (
            "{a: &x {b: 1}, <<: *x, c: 2}",
            json!({ "a": { "b": 1 }, "b": 1, "c": 2 }),
        ),
        ("{<<: [{a: 1}, {a: 2, b: 3}]}", json!({ "a": 1, "b": 3 })),
        ("{<<: {a: 1}, a: 2}", json!({ "a": 2 })),
        ("{'<<': 1}", json!({ "<<": 1 })),
    ] {
        assert_eq!(value(text), Ok(expected), "{text}");
    }
    for (text, expected) in [
        ("{null: x}", "a key is null"),
        ("{[a]: x}", "a key is a list"),
        ("{{a: b}: x}", "a key is a mapping"),
        ("{1.0e30: x}", "as a key is to be in quotes"),
        ("{a: 1, a: 2}", "the key \"a\" is there twice"),
        ("{1: a, '1': b}", "the key \"1\" is there twice"),
        ("{<<: 5}", "`<<` wants a mapping"),
        ("&x {b: *x}", "an alias is in the value that it repeats"),
    ] {
        let error = value(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn documents_may_be_json_or_yaml() {
    let objects = |text: &str| documents(text).map_err(|error| error.to_string());
    let both = Ok(vec![json!({ "a": 1 }), json!({ "b": "\u{1f600}" })]);
    for text in [
        "{\"a\": 1}\n{\"b\": \"\\ud83d\\ude00\"}\n",
        "\u{feff}{\"a\": 1.0}\n---\n{\"b\": \"\\ud83d\\ude00\"}",
        "{\"a\": 1}\n---\nb: \u{1f600}\n",
        "a: 1\n---\n{\"b\": \"\\ud83d\\ude00\"}\n",
        "a: 1\r\n--- # next\r\nb: \"\\U0001f600\"\r\n",
        "{\n\t\"a\": 1\n}\n# next\n---\n{b: \u{1f600},}\n",
    ] {
        assert_eq!(objects(text), both, "{text}");
    }
    assert_eq!(
        objects("---\n---\na: 1\n"),
        Ok(vec![Value::Null, json!({ "a": 1 })])
    );
    assert_eq!(objects("# nothing\n"), Ok(vec![]));
    assert_eq!(objects(""), Ok(vec![]));
    for (text, line) in [
        ("{\"a\": 1} x", "line 1, "),
        (
            "{\"a\": 1}\n{\"b\": 1, \"b\": 2}\n",
            "line 2, column 10: the key \"b\"",
        ),
        ("{\"a\": 1}\n---\nb: [\n", "line "),
        ("a:\n\tb: 1\n", "line 2, "),
    ] {
        let error = objects(text).unwrap_err();
        assert!(error.starts_with(line), "{text}: {error}");
    }
}

#[test]
fn aliases_and_nesting_are_bounded() {
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    assert!(value(&deep(127)).is_ok());
    let error = value(&deep(128)).unwrap_err();
    assert!(error.contains("more than 128 levels"), "{error}");
    assert!(documents(&"[".repeat(100_000)).is_err());
    let half = deep(64);
    let error = documents(&format!(
        "a: &x {half}\nb: &y [*x, {half}]\nc: [[*y]]\nd: {}\n",
        deep(1)
    ));
    assert!(error.is_ok(), "{error:?}");
    let nested = format!("a: &x {half}\nb: {}*x{}\n", "[".repeat(64), "]".repeat(64));
    assert!(documents(&nested).is_err());

    let mut bomb = "a0: &a0 [lol]\n".to_owned();
    for level in 1..12 {
        let items = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{items}]\n"));
    }
    let error = documents(&bomb).unwrap_err().to_string();
    assert!(error.contains("aliases repeat more than"), "{error}");
    // Each level would be there once more.
    let (begin, end) = ("&a [".repeat(120), "]".repeat(120));
    let anchors = format!("{begin}{}{end}", "1,".repeat(100_000));
    let error = documents(&anchors).unwrap_err().to_string();
    assert!(error.contains("anchors and aliases repeat"), "{error}");
    assert!(document(&anchors, Aliases::Refused).is_ok());
    let long = format!("{{{0}: 1, {0}: 2}}", "k".repeat(1_000));
    let error = documents(&long).unwrap_err().to_string();
    assert!(
        error.len() < 600 && error.contains("is there twice"),
        "{error}"
    );
    let refused = document("a: &x 1\nb: *x\n", Aliases::Refused).unwrap_err();
    assert!(
        refused.to_string().contains("aliases are not supported"),
        "{refused}"
    );
}

#[test]
fn text_has_one_document() {
    let read = |text: &str| document(text, Aliases::Expanded).map_err(|error| error.to_string());
    assert_eq!(read("a: &x 1\nb: *x\n"), Ok(json!({ "a": 1, "b": 1 })));
    assert_eq!(read(""), Ok(Value::Null));
    assert_eq!(
        read("a\n---\nb\n"),
        Err("it has more than one document".to_owned())
    );
    // Each takes as long as the first.
    let many = "{}".repeat(500_000);
    assert_eq!(read(&many), Err("it has more than one document".to_owned()));
    let second = document("{}\n {\"a\" 1}", Aliases::Refused).unwrap_err();
    assert!(second.to_string().starts_with("line 2, "), "{second}");
}
