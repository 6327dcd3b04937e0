//! Files of objects, read by kubectl and by `nodedock claim create`: both make the same objects, or both refuse.

use std::path::Path;

use serde_json::{Value, json};

use super::Machine;

const CLAIM: &str = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: a}\n\
    spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu}}]}}\n";

/// Scalars of the parameters of a claim, which may be any JSON.
const SCALARS: &[&str] = &[
    "0755",
    "0400",
    "-0755",
    "+0755",
    "089",
    "0o17",
    "0O17",
    "+0o17",
    "0o8",
    "0x1F",
    "0X1f",
    "-0x1F",
    "0x",
    "0x_1F",
    "0b101",
    "-0b11",
    "0b2",
    "8080.0",
    "1e3",
    "1E3",
    "1e+3",
    "3.0e+2",
    "1.e3",
    ".5",
    "5.",
    "-.5",
    "+.5",
    "0.10",
    "000.5",
    "00",
    "-0",
    "-0.0",
    "+1",
    "+-1",
    "1_000",
    "1__0",
    "1_",
    "_1",
    "0_7",
    "1_000.5",
    "1e3_0",
    "1e400",
    "-1e400",
    "1e-400",
    "1e-7",
    "1e18",
    "1e19",
    "1e21",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "-9223372036854775809",
    "0777777777777777777777777",
    "1:30",
    "190:20:30",
    "1Gi",
    "1e",
    "e3",
    ".",
    "=",
    "2001-01-01",
    "2001-12-14t21:59:43.10-05:00",
    "~",
    "null",
    "Null",
    "NULL",
    "nULL",
    "yes",
    "Yes",
    "YES",
    "yEs",
    "y",
    "Y",
    "n",
    "no",
    "on",
    "ON",
    "oN",
    "off",
    "true",
    "True",
    "tRUE",
    "False",
    ".iNf",
    "nan",
    "inf",
    "-inf",
    "''",
    "\"\"",
    "\"0755\"",
    "'yes'",
    "\"a\\tb\\u00e9\\x41\"",
    "'it''s'",
    "a#b",
    "é",
    "\u{1f600}",
    "a\u{a0}b",
    "!!str 1",
    "!!str yes",
    "!!int '1'",
    "!!float 1",
    "!!bool 'yes'",
    "!!null ''",
    "!other 1",
    "! 12",
    "&x anchored",
    "*x",
    "[1, 2,]",
    "{a: }",
    "{on: 1, off}",
    "{0755: a, 1.5: b, 1e3: c, 0x1F: d, 1_000.5: e}",
    "{? a, 'b': 1}",
    "{a: &y {b: 1}, <<: *y, c: 2}",
    "{<<: [{a: 1}, {a: 2, b: 3}]}",
    "{a: 3, <<: {a: 1}}",
    "{'<<': {a: 1}}",
];

/// How both read a file.
enum Outcome {
    Same,
    Refused,
    /// Only kubectl reads it, because of what this program is stricter about.
    OnlyKubectl,
    /// Only this program reads all of it, which is more than kubectl's division into documents can.
    OnlyHere,
}

use Outcome::{OnlyHere, OnlyKubectl, Refused, Same};

/// The claim with one part replaced.
fn with(old: &str, new: &str) -> Vec<u8> {
    assert!(CLAIM.contains(old), "{old}");
    CLAIM.replace(old, new).into()
}

fn as_json(name: &str) -> String {
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": { "name": name },
        "spec": { "devices": { "requests": [{ "name": "r", "exactly": { "deviceClassName": "gpu" } }] } },
    });
    claim.to_string()
}

/// The items of a list, one for each manifest.
fn items(manifests: &[&str]) -> String {
    let item = |manifest: &&str| format!("- {}\n", manifest.trim_end().replace('\n', "\n  "));
    manifests.iter().map(item).collect()
}

/// Claims, and fields and values of them.
fn of_one_claim() -> Vec<(&'static str, Vec<u8>, Outcome)> {
    let label = |field: &str| with("name: a", &format!("name: a, {field}"));
    let count = |value: &str| with("gpu}", &format!("gpu, count: {value}}}"));
    vec![
        ("count 0x2", count("0x2"), Same),
        ("count 2.0", count("2.0"), Same),
        ("count 1_0", count("1_0"), Same),
        ("count null", count("null"), Same),
        ("count 2.5", count("2.5"), Refused),
        ("count as text", count("'2'"), Refused),
        ("count yes", count("yes"), Refused),
        ("count too large", count("18446744073709551615"), Refused),
        ("class 1", with("gpu", "1"), Refused),
        ("class null", with("gpu", "null"), Refused),
        ("name y", with("name: a", "name: y"), Refused),
        ("name as date", with("name: a", "name: 2001-01-01"), Same),
        ("label on", label("labels: {on: x}"), Same),
        ("label octal", label("labels: {0755: x}"), Same),
        ("label yes", label("labels: {x: yes}"), Refused),
        ("label 1", label("labels: {x: 1}"), Refused),
        ("label null", label("labels: {x: }"), Refused),
        ("label empty", label("labels: {x: ''}"), Same),
        ("labels null", label("labels: null"), Same),
        ("labels as list", label("labels: [x]"), Refused),
        ("alias", label("labels: &l {x: z}, annotations: *l"), Same),
        ("merge", label("<<: {labels: {x: z}}"), Same),
        (
            "text",
            label("annotations: {k: \"tab\\t nl\\n q\\\" \\u00e9 \\U0001f600 é\"}"),
            Same,
        ),
        (
            "blocks",
            with(
                "{name: a}",
                "\n  name: a\n  annotations:\n    x: |\n      a\n       b\n      ---\n\n    z: >\n      f\n      g\n    k: |-\n      h",
            ),
            Same,
        ),
        (
            "status",
            [CLAIM, "status: {reservedFor: []}\n"].concat().into(),
            Same,
        ),
        ("unknown field", with("gpu", "gpu, color: red"), Refused),
        (
            "unknown at top",
            [CLAIM, "color: red\n"].concat().into(),
            Refused,
        ),
        ("unknown in metadata", label("color: red"), Refused),
        (
            "unknown in status",
            [CLAIM, "status: {color: red}\n"].concat().into(),
            Refused,
        ),
        (
            "other case",
            with("deviceClassName", "deviceclassname"),
            Refused,
        ),
        ("no kind", with("kind: ResourceClaim\n", ""), Refused),
        ("kind 1", with("kind: ResourceClaim", "kind: 1"), Refused),
        (
            "no version",
            with("apiVersion: resource.k8s.io/v1\n", ""),
            Refused,
        ),
        ("other version", with("/v1\n", "/v1beta1\n"), Refused),
        (
            "foreign kind",
            b"apiVersion: v1\nkind: Service\nmetadata: {name: s}\n".into(),
            Refused,
        ),
        (
            "key twice",
            with("name: a", "name: z, name: a"),
            OnlyKubectl,
        ),
    ]
}

/// Documents, lists and encodings.
fn of_files() -> Vec<(&'static str, Vec<u8>, Outcome)> {
    let (one, two) = (CLAIM, CLAIM.replace("name: a", "name: b"));
    let (json_one, json_two) = (as_json("a"), as_json("b"));
    let list = |kind: &str, items: &str| format!("{kind}\nitems:\n{items}").into_bytes();
    let (any, claims) = (
        "apiVersion: v1\nkind: List",
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimList",
    );
    let bare = one.replace("apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\n", "");
    let unknown = one.replace("gpu", "gpu, color: red");
    let indented = serde_json::from_str::<Value>(&json_one).expect("JSON");
    let indented = format!("{indented:#}").replace("  ", "\t");
    let template = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: t}\n\
        spec: {spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu, count: 0x2}}]}}}\n";
    let class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: c}\n\
        spec: {selectors: [{cel: {expression: 'device.driver == \"x\"'}}]}\n";
    let utf16 = one.encode_utf16().flat_map(u16::to_le_bytes);
    vec![
        ("two", format!("{one}---\n{two}").into(), Same),
        (
            "empty documents",
            format!("---\n---\n{one}--- # next\n---\n# none\n---   \n{two}---\n").into(),
            Same,
        ),
        (
            "end of document",
            format!("{one}...\n---\n{two}").into(),
            Same,
        ),
        (
            "template and class",
            format!("{template}---\n{class}").into(),
            Same,
        ),
        ("BOM", format!("\u{feff}{one}").into(), Same),
        (
            "CRLF",
            format!("{one}---\n{two}").replace('\n', "\r\n").into(),
            Same,
        ),
        (
            "tabs between",
            one.replace("kind: ", "kind:\t").into(),
            Same,
        ),
        (
            "tab as indent",
            one.replace("{name: a}", "\n\tname: a").into(),
            Refused,
        ),
        ("JSON", json_one.clone().into(), Same),
        (
            "JSON objects",
            format!("{json_one}\n{json_two}").into(),
            Same,
        ),
        (
            "JSON documents",
            format!("\u{feff}{json_one}\n---\n{json_two}").into(),
            Same,
        ),
        ("JSON with tabs", indented.into(), Same),
        ("JSON, YAML", format!("{json_one}\n---\n{two}").into(), Same),
        ("YAML, JSON", format!("{one}---\n{json_two}").into(), Same),
        (
            "JSON with comment",
            format!("# one\n{json_one}").into(),
            Same,
        ),
        (
            "JSON with comma",
            json_one.replace("]}}", ",]}}").into(),
            Same,
        ),
        (
            "JSON number",
            json_one.replace("\"gpu\"", "\"gpu\",\"count\":2.0").into(),
            Same,
        ),
        (
            "JSON fraction",
            json_one.replace("\"gpu\"", "\"gpu\",\"count\":2.5").into(),
            Refused,
        ),
        (
            "JSON escape",
            json_one.replace("\"gpu\"", "\"\\u0067pu\"").into(),
            Same,
        ),
        ("JSON and text", format!("{json_one} x").into(), Refused),
        (
            "JSON key twice",
            json_one
                .replace("\"name\":\"a\"", "\"name\":\"z\",\"name\":\"a\"")
                .into(),
            OnlyKubectl,
        ),
        ("list", list(any, &items(&[one, &two])), Same),
        ("typed list", list(claims, &items(&[one])), Same),
        (
            "typed list of bare items",
            list(claims, &items(&[&bare])),
            Same,
        ),
        ("empty list", format!("{any}\nitems: []\n").into(), Refused),
        ("list without items", format!("{any}\n").into(), Refused),
        (
            "unknown field in list",
            list(any, &items(&[one, &unknown])),
            Refused,
        ),
        (
            "null in list",
            list(any, &format!("- null\n{}", items(&[one]))),
            OnlyHere,
        ),
        (
            "good, unknown field",
            format!("{one}---\n{unknown}").into(),
            Refused,
        ),
        ("good, no YAML", format!("{one}---\n{{\n").into(), Refused),
        ("text", b"hello\n".into(), Refused),
        ("number", b"5\n".into(), Refused),
        ("sequence", b"- a\n".into(), Refused),
        ("nothing", Vec::new(), Refused),
        ("comment", b"# nothing\n".into(), Refused),
        ("NUL", one.replace("gpu", "g\0u").into(), Refused),
        (
            "unknown field of class",
            class.replace("selectors", "selectrs").into(),
            Refused,
        ),
        (
            "line of dashes",
            format!("{one}----\n{two}").into(),
            Refused,
        ),
        (
            "document in its line",
            format!("--- {json_one}\n").into(),
            OnlyHere,
        ),
        (
            "directive",
            format!("%YAML 1.1\n---\n{one}").into(),
            OnlyHere,
        ),
        (
            "end without begin",
            format!("{one}...\n{two}").into(),
            OnlyHere,
        ),
        (
            "UTF-16",
            [0xff, 0xfe].into_iter().chain(utf16).collect(),
            OnlyKubectl,
        ),
    ]
}

/// Files that are one claim with these parameters, and that neither reads.
fn refused_scalars() -> Vec<(&'static str, Vec<u8>, Outcome)> {
    let scalars = [
        ".inf",
        "-.Inf",
        ".nan",
        "-",
        "a: b: c",
        "[a, b",
        "*none",
        "%x",
        "@x",
        "`x`",
        "{null: x}",
        "{[a]: x}",
        "{<<: 5}",
        "&x {a: *x}",
        "!!int x",
        "\"\\q\"",
    ];
    let row = |scalar: &'static str| (scalar, with_parameters(scalar).into_bytes(), Refused);
    scalars.into_iter().map(row).collect()
}

fn with_parameters(value: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: a}}\nspec:\n  devices:\n    requests: \
         [{{name: r, exactly: {{deviceClassName: gpu}}}}]\n    config:\n    - opaque:\n        driver: d.example.com\n        \
         parameters:\n          v: {value}\n"
    )
}

/// Objects of a command's output, without what the server adds.
fn objects(output: &str) -> Vec<Value> {
    let mut objects = Vec::new();
    for value in serde_json::Deserializer::from_str(output).into_iter::<Value>() {
        let mut value = value.expect("JSON");
        match (value["kind"] == "List", value.is_array()) {
            (true, _) => objects.append(value["items"].as_array_mut().expect("a list has items")),
            (_, true) => objects.append(value.as_array_mut().expect("it is one")),
            _ => objects.push(value),
        }
    }
    for object in &mut objects {
        for added in [
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "managedFields",
            "generation",
        ] {
            object["metadata"]
                .as_object_mut()
                .expect("an object has metadata")
                .remove(added);
        }
    }
    objects
}

impl Machine {
    /// What kubectl and this program would make of a file, or the error.
    async fn read_by_both(&self, file: &Path) -> [Result<Vec<Value>, String>; 2] {
        let file = file.to_str().expect("the root has a name in UTF-8");
        let kubectl = [
            "create",
            "--dry-run=server",
            "--validate=strict",
            "-o",
            "json",
            "-f",
            file,
        ];
        let own = ["claim", "create", "--dry-run", "-o", "json", "-f", file];
        let (kubectl, own) = tokio::join!(self.kubectl(&kubectl), self.cli(&own));
        [kubectl, own].map(|output| match output.code {
            Some(0) => Ok(objects(&output.stdout)),
            _ => Err(output.stderr),
        })
    }
}

#[tokio::test]
async fn file_scalars_are_those_of_kubectl() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let item = |scalar: &&str| format!("\n          - {scalar}");
    let list: String = SCALARS.iter().map(item).collect();
    let file = machine.write("scalars.yaml", with_parameters(&list));
    let [kubectl, own] = machine
        .read_by_both(&file)
        .await
        .map(|read| read.expect("it is read").remove(0));
    let values = |claim: &Value| {
        claim["spec"]["devices"]["config"][0]["opaque"]["parameters"]["v"]
            .as_array()
            .expect("the parameters have them")
            .clone()
    };
    for (scalar, (kubectl, own)) in SCALARS
        .iter()
        .zip(values(&kubectl).iter().zip(values(&own)))
    {
        // Go writes a large number with fewer digits.
        let same = match (kubectl.as_f64(), own.as_f64()) {
            (Some(kubectl), Some(own)) => kubectl == own,
            _ => *kubectl == own,
        };
        assert!(same, "{scalar}: {kubectl} of kubectl, and {own}");
    }
    assert_eq!(
        [&kubectl, &own].map(|claim| values(claim).len()),
        [SCALARS.len(); 2]
    );
}

#[tokio::test]
async fn files_are_read_like_kubectl() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let rows = of_one_claim().into_iter().chain(of_files());
    let mut wrong = Vec::new();
    for (name, text, outcome) in rows.chain(refused_scalars()) {
        let file = machine.write("objects.yaml", text);
        let [kubectl, own] = machine.read_by_both(&file).await;
        let is_right = match outcome {
            Same => kubectl.is_ok() && kubectl == own,
            Refused => kubectl.is_err() && own.is_err(),
            OnlyKubectl => kubectl.is_ok() && own.is_err(),
            OnlyHere => own.is_ok() && kubectl != own,
        };
        if !is_right {
            wrong.push(format!("{name}: kubectl {kubectl:?}\n  nodedock {own:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let claims = machine
        .kubectl(&["get", "resourceclaims", "-o", "name"])
        .await
        .done();
    assert_eq!(claims, "", "a dry run makes nothing");
}
