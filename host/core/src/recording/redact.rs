//! Leaves values out of a recording that leaves the node: those of fields that may have secrets, regardless of their content.
//!
//! A field is named by the contract (`wit/`) or by a protocol of the kubelet. A call without any such value stays as it was recorded, and
//! can be replayed; any other call is marked, and can only be printed. Paths, names, identifiers, and contents of files below `/sys` stay.

use serde_json::Value;

use super::file::{ReadError, parse_line};
use super::{CallOutcome, HostCall, Line, RecordedCall};

/// Fields of arguments and answers whose values are left out. A test has the other fields of the schemas that are texts or bytes, so that a
/// new field is in one of the two lists.
const FIELDS: [&str; 14] = [
    "annotations",
    "args",
    "data",
    "details",
    "env",
    "envs",
    "error",
    "memo",
    "message",
    "options",
    "parameters",
    "progress",
    "raw",
    "resource_handle",
];

/// Takes the place of a value: no longer in JSON than the shortest text in a map, by more than a half.
const LEFT_OUT: &str = "***";

/// Returns the lines of a recording, without its header and its last line, with the values left out. Parses one line at a time.
pub fn redact(lines: &[&[u8]]) -> Result<Vec<Vec<u8>>, ReadError> {
    let mut is_config_left_out = false;
    let redacted = (2..).zip(lines).map(|(number, line)| {
        let mut parsed = parse_line(number, line)?;
        let has_changed = match &mut parsed {
            Line::Revision(revision) => {
                // An operator's values, for any purpose.
                is_config_left_out = revision.config.take().is_some();
                is_config_left_out
            }
            Line::Call(recorded) => {
                let has_changed = call(recorded);
                recorded.has_values_left_out |= is_config_left_out;
                has_changed || is_config_left_out
            }
            Line::Lost(_) | Line::File(_) | Line::End(_) => false,
        };
        Ok(match has_changed {
            true => serde_json::to_vec(&parsed).expect("a line that was parsed can be written"),
            false => line.to_vec(),
        })
    });
    redacted.collect()
}

/// Leaves values out of a call, and marks it unless they were in its log alone, which no replay compares.
fn call(call: &mut RecordedCall) -> bool {
    let mut is_left_out = fields(&mut call.arguments) | answer(&mut call.answer);
    let mut is_log_left_out = false;
    for host in &mut call.host {
        match host.function.as_ref() {
            "log.write" => is_log_left_out |= all(&mut host.arguments),
            _ => is_left_out |= host_call(host),
        }
    }
    call.has_values_left_out |= is_left_out;
    is_left_out || is_log_left_out
}

/// A problem of a host function has the host's own text: a path, and why it cannot be used.
fn host_call(call: &mut HostCall) -> bool {
    let CallOutcome::Returned(returned) = &mut call.answer else {
        return false;
    };
    match call.function.as_ref() {
        // The contents of a file, and what keys are made of.
        "host-files.read" => returned.get_mut("Ok").is_some_and(all),
        "wasi-random.random" => all(returned),
        // The driver's bytes.
        "progress.save" => all(&mut call.arguments),
        _ if returned.get("Err").is_some() => false,
        _ => fields(returned),
    }
}

fn answer(answer: &mut CallOutcome) -> bool {
    match answer {
        CallOutcome::Returned(value) => fields(value),
        CallOutcome::Failed(failure) => {
            failure.message = LEFT_OUT.to_owned();
            true
        }
    }
}

/// Leaves out the values of all [`FIELDS`] below a value.
fn fields(value: &mut Value) -> bool {
    match value {
        Value::Array(values) => values
            .iter_mut()
            .fold(false, |left, value| left | fields(value)),
        Value::Object(named) => named.iter_mut().fold(false, |left, (name, value)| {
            left | match FIELDS.contains(&name.as_str()) {
                true => field(value),
                false => fields(value),
            }
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Leaves out the value of one field. Of a list of messages, which `parameters` is in a claim, the fields: their names are the rule there.
/// Keys of pairs and maps stay.
fn field(value: &mut Value) -> bool {
    match value {
        Value::Array(values) if values.iter().any(Value::is_object) => {
            values.iter_mut().fold(false, |left, value| {
                left | match value {
                    Value::Object(pair) if pair.contains_key("key") => {
                        pair.get_mut("value").is_some_and(all)
                    }
                    Value::Object(_) => fields(value),
                    value => all(value),
                }
            })
        }
        Value::Object(entries) => entries
            .values_mut()
            .fold(false, |left, value| left | all(value)),
        value => all(value),
    }
}

/// Leaves out a whole value, unless it is empty.
fn all(value: &mut Value) -> bool {
    let is_empty = match &*value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    if !is_empty {
        *value = Value::from(LEFT_OUT);
    }
    !is_empty
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::recording::{Failure, Revision};

    fn a_call(host: Vec<HostCall>, arguments: Value, answer: Value) -> RecordedCall {
        RecordedCall {
            operation: "prepare".into(),
            request: "r-1".to_owned(),
            at_ms: 1,
            arguments,
            host,
            answer: CallOutcome::Returned(answer),
            has_values_left_out: false,
        }
    }

    fn host(function: &'static str, arguments: Value, answer: Value) -> HostCall {
        HostCall {
            function: function.into(),
            arguments,
            answer: CallOutcome::Returned(answer),
        }
    }

    fn redacted(lines: &[Line]) -> Vec<Line> {
        let texts: Vec<_> = lines
            .iter()
            .map(|line| serde_json::to_vec(line).unwrap())
            .collect();
        let texts: Vec<_> = texts.iter().map(Vec::as_slice).collect();
        let redacted = redact(&texts).unwrap();
        redacted
            .iter()
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect()
    }

    fn redacted_call(call: RecordedCall) -> RecordedCall {
        match redacted(&[Line::Call(call)]).swap_remove(0) {
            Line::Call(call) => call,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn possible_secrets_are_left_out() {
        let arguments = json!({"prepare": {"claims": [{
            "id": {"name": "x"},
            "parameters": [{"source": "Claim", "requests": ["gpu"], "parameters": "{\"key\":\"s3cret\"}"}],
            "annotations": [{"key": "a", "value": "s3cret"}, {"key": "b", "value": ""}],
            "progress": b"s3cret".to_vec(),
        }]}});
        let answer = json!([{"uid": "u", "outcome": {"Ok": {
            "edits": {
                "env": [{"key": "LICENSE", "value": "s3cret"}],
                "mounts": [{"host_path": "/a", "options": ["ro", "password=s3cret"]}],
                "hooks": [{"path": "/h", "args": ["s3cret"], "env": []}],
            },
            "memo": b"s3cret".to_vec(),
        }}}, {"uid": "v", "outcome": {"Err": {"code": "c", "message": "s3cret", "details": []}}}]);
        let calls = vec![
            host(
                "host-files.read",
                json!(["/etc/license"]),
                json!({"Ok": "s3cret"}),
            ),
            host(
                "progress.save",
                json!(["u", b"s3cret".to_vec()]),
                json!({"Ok": null}),
            ),
            host("wasi-random.random", json!(4), json!([1, 2, 3, 4])),
            host("log.write", json!(["Info", "s3cret", []]), json!(null)),
            host("sysfs.read", json!(["a"]), json!({"Ok": "7"})),
            host(
                "sysfs.read",
                json!(["b"]),
                json!({"Err": {"message": "b: not there"}}),
            ),
        ];
        let redacted = redacted_call(a_call(calls, arguments, answer));
        assert_eq!(
            redacted.arguments,
            json!({"prepare": {"claims": [{
                "id": {"name": "x"},
                "parameters": [{"source": "Claim", "requests": ["gpu"], "parameters": "***"}],
                "annotations": [{"key": "a", "value": "***"}, {"key": "b", "value": ""}],
                "progress": "***",
            }]}})
        );
        assert_eq!(
            redacted.answer,
            CallOutcome::Returned(json!([{"uid": "u", "outcome": {"Ok": {
                "edits": {
                    "env": [{"key": "LICENSE", "value": "***"}],
                    "mounts": [{"host_path": "/a", "options": "***"}],
                    "hooks": [{"path": "/h", "args": "***", "env": []}],
                },
                "memo": "***",
            }}}, {"uid": "v", "outcome": {"Err": {"code": "c", "message": "***", "details": []}}}]))
        );
        assert_eq!(
            redacted.host,
            [
                host(
                    "host-files.read",
                    json!(["/etc/license"]),
                    json!({"Ok": "***"})
                ),
                host("progress.save", json!("***"), json!({"Ok": null})),
                host("wasi-random.random", json!(4), json!("***")),
                host("log.write", json!("***"), json!(null)),
                host("sysfs.read", json!(["a"]), json!({"Ok": "7"})),
                host(
                    "sysfs.read",
                    json!(["b"]),
                    json!({"Err": {"message": "b: not there"}})
                ),
            ]
        );
        assert!(redacted.has_values_left_out);
    }

    #[test]
    fn messages_of_plugins_lose_their_values() {
        let answer = json!({"container_responses": [{
            "envs": {"TOKEN": "s3cret", "EMPTY": ""},
            "annotations": {"a": "s3cret"},
            "mounts": [{"container_path": "/c", "host_path": "/h"}],
        }]});
        let redacted = redacted_call(a_call(
            Vec::new(),
            json!({"resource_handle": "s3cret"}),
            answer,
        ));
        assert_eq!(redacted.arguments, json!({"resource_handle": "***"}));
        assert_eq!(
            redacted.answer,
            CallOutcome::Returned(json!({"container_responses": [{
                "envs": {"TOKEN": "***", "EMPTY": ""},
                "annotations": {"a": "***"},
                "mounts": [{"container_path": "/c", "host_path": "/h"}],
            }]}))
        );
        let failed = redacted_call(RecordedCall {
            answer: CallOutcome::Failed(Failure {
                code: "Internal".to_owned(),
                message: "s3cret".to_owned(),
                by_time: false,
            }),
            ..a_call(Vec::new(), json!(null), json!(null))
        });
        assert!(failed.has_values_left_out);
        assert!(!serde_json::to_string(&failed).unwrap().contains("s3cret"));
    }

    #[test]
    fn call_without_secrets_is_unchanged() {
        let line = br#"{"call":{"operation":"discover","request":"r","atMs":1, "arguments":{"z":1,"a":[]},"host":[],"answer":{"returned":{"env":[]}}}}"#;
        assert_eq!(redact(&[line]).unwrap(), [line.to_vec()]);
        let with_log = a_call(
            vec![host(
                "log.write",
                json!(["Info", "s3cret", []]),
                json!(null),
            )],
            json!({}),
            json!([]),
        );
        let redacted = redacted_call(with_log);
        assert!(!redacted.has_values_left_out);
        assert_eq!(redacted.host[0].arguments, json!("***"));
    }

    #[test]
    fn calls_with_a_config_are_marked() {
        let revision = |config: Option<&str>| {
            Line::Revision(Revision {
                config: config.map(str::to_owned),
                ..Revision::native("gpu.example.com")
            })
        };
        let call = || Line::Call(a_call(Vec::new(), json!({}), json!([])));
        let lines = [
            revision(Some("{\"token\":\"s3cret\"}")),
            call(),
            revision(None),
            call(),
        ];
        let redacted = redacted(&lines);
        let Line::Call(marked) = &redacted[1] else {
            panic!("{redacted:?}")
        };
        assert!(marked.has_values_left_out);
        assert_eq!(
            (&redacted[0], &redacted[2..]),
            (&revision(None), &lines[2..])
        );
    }

    /// Schemas of what is recorded of WASM drivers, and of plugins.
    const WIT: [&str; 6] = [
        include_str!("../../../../wit/claims.wit"),
        include_str!("../../../../wit/common.wit"),
        include_str!("../../../../wit/container-edits.wit"),
        include_str!("../../../../wit/facets.wit"),
        include_str!("../../../../wit/host.wit"),
        include_str!("../../../../wit/inventory.wit"),
    ];
    const PROTOCOLS: [&str; 7] = [
        include_str!("../../../../proto/proto/kubelet/deviceplugin/v1beta1/api.proto"),
        include_str!("../../../../proto/proto/kubelet/dra/v1/api.proto"),
        include_str!("../../../../proto/proto/kubelet/dra/v1alpha2/api.proto"),
        include_str!("../../../../proto/proto/kubelet/dra/v1alpha3/api.proto"),
        include_str!("../../../../proto/proto/kubelet/dra/v1beta1/api.proto"),
        include_str!("../../../../proto/proto/kubelet/dra_health/v1/api.proto"),
        include_str!("../../../../proto/proto/kubelet/dra_health/v1alpha1/api.proto"),
    ];

    /// Names, identifiers, paths, versions, amounts, and values that the API server publishes. `config` is left out of the revision: the
    /// context of a recorded call has none.
    const PLAIN_FIELDS: &str = "
        api_group binding_conditions binding_failure_conditions boot_id capacity clos_id code config container_interface container_path
        counter_set default_amount device device_path driver_version extended_resource facts fs_type groups hardware_address host_interface
        host_path identity interface_name ips key kind max min multiplier name namespace next node_name partition_type_attribute path
        per_container per_pod pool real_path reason request request_id requests resource schemata share_id step sysfs_path uid value
        ID available_deviceIDs cdi_device_ids cdi_devices claim_name claim_uid claims deviceIDs device_name devices devices_ids endpoint
        health must_include_deviceIDs permissions pool_name request_names resource_name string strings version
    ";

    /// The name of a field of a record or message that is a text or bytes, or has such values, in snake case.
    fn text_field(line: &str) -> Option<String> {
        let words: Vec<_> = line.split_whitespace().collect();
        let is_text = |kind: &str| {
            let texts = [
                "string",
                "list<u8>",
                "key-value",
                "quantity",
                "bytes",
                "map<",
            ];
            texts.iter().any(|text| kind.contains(text))
        };
        match words[..] {
            [name, kind] if name.ends_with(':') && kind.ends_with(',') && is_text(kind) => {
                Some(name.trim_matches(['%', ':']).replace('-', "_"))
            }
            [ref kind @ .., name, "=", number]
                if number.ends_with(';') && is_text(&kind.concat()) =>
            {
                Some(name.to_owned())
            }
            _ => None,
        }
    }

    #[test]
    fn every_schema_text_has_a_rule() {
        let plain: Vec<_> = PLAIN_FIELDS.split_whitespace().collect();
        let lines = WIT
            .iter()
            .chain(&PROTOCOLS)
            .flat_map(|schema| schema.lines());
        let fields: BTreeSet<_> = lines.filter_map(text_field).collect();
        let rules: BTreeSet<_> = plain
            .iter()
            .chain(&FIELDS)
            .map(|name| (*name).to_owned())
            .collect();
        assert_eq!(fields, rules);
        assert!(plain.iter().all(|name| !FIELDS.contains(name)));
    }

    /// Host functions without a rule of their own: a redaction leaves out only their values in [`FIELDS`].
    const PLAIN_FUNCTIONS: &str = "
        sysfs.read sysfs.read-bytes sysfs.read-dir sysfs.read-link sysfs.glob sysfs.wait-for sysfs-write.write host-files.stat host-files.glob
        pci-driver.bind pci-driver.restore device-nodes.glob device-nodes.wait-for device-nodes.stat net-interfaces.all net-interfaces.get prepared-claims.all
        prepared-claims.using-device prepared-claims.get
    ";

    #[test]
    fn every_host_function_has_a_rule() {
        let (mut interface, mut functions) = ("", BTreeSet::new());
        for line in include_str!("../../../../wit/host.wit").lines() {
            if let Some(name) = line.strip_prefix("interface ") {
                interface = name.trim_end_matches(" {");
            } else if let Some((name, _)) = line.split_once(": func(") {
                functions.insert(format!("{interface}.{}", name.trim()));
            }
        }
        let rules = ["log.write", "host-files.read", "progress.save"].into_iter();
        let rules = rules.chain(PLAIN_FUNCTIONS.split_whitespace());
        assert_eq!(functions, rules.map(str::to_owned).collect());
    }

    /// Any JSON, with the names of fields among its keys.
    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<Vec<u8>>().prop_map(Value::from),
            "[a-z]{0,3}".prop_map(Value::from)
        ];
        let key = || {
            prop_oneof![
                prop::sample::select(&FIELDS[..]).prop_map(str::to_owned),
                "[a-z]{1,3}"
            ]
        };
        leaf.prop_recursive(4, 40, 5, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(key(), inner, 0..4)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn redacted_line_growth_is_bounded(arguments in json(), answer in json()) {
            let line = serde_json::to_vec(&Line::Call(a_call(Vec::new(), arguments, answer))).unwrap();
            let redacted = redact(&[&line]).unwrap().swap_remove(0);
            prop_assert!(redacted.len() <= line.len() * 3 / 2);
            prop_assert_eq!(redact(&[&redacted]).unwrap().swap_remove(0), redacted);
        }
    }
}
