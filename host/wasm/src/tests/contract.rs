//! The contract and its use: each function that a driver can export has a caller here, each function of the host answers a guest, and each
//! field of each record is converted on both sides. What the host does with a field after that is in `readers`.
//!
//! The tables are compared with the WIT files, and then with the sources by the names that the bindings have: an addition to the contract
//! without its use fails here.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::json;
use wit_parser::abi::AbiVariant;
use wit_parser::{Function, Resolve, TypeDefKind, WorldItem, WorldKey};

use super::guest::PREPARE_ONE;
use super::hostile::{node, table};
use super::*;
use nodedock_core::driver::ClaimDriver;
use nodedock_model::LeftOutDevice;

/// Exported functions: `interface.function`, the file in `src` that calls it, and a test of it with a guest: its file in `src/tests`, and its
/// name.
const EXPORTS: &[(&str, &str, &str, &str)] = &[
    (
        "identity.describe",
        "lib.rs",
        "loading.rs",
        "a_describe_that_fails_is_named",
    ),
    (
        "discovery.discover",
        "calls/guest_calls.rs",
        "running.rs",
        "each_call_has_a_fresh_instance",
    ),
    (
        "preparation.prepare",
        "calls/guest_calls.rs",
        "running.rs",
        "edits_beyond_the_grant_are_refused",
    ),
    (
        "preparation.unprepare",
        "calls/guest_calls.rs",
        "parameters.rs",
        "unprepare_needs_no_valid_parameters",
    ),
    (
        "configuration.config-schema",
        "calls/guest_calls.rs",
        "hostile.rs",
        "hostile_drivers_leave_host_unharmed",
    ),
    (
        "configuration.parameters-schema",
        "calls/guest_calls.rs",
        "parameters.rs",
        "schema_is_published_after_load",
    ),
    (
        "configuration.validate-config",
        "calls/guest_calls.rs",
        "hostile.rs",
        "hostile_drivers_leave_host_unharmed",
    ),
    (
        "configuration.validate-parameters",
        "calls/guest_calls.rs",
        "parameters.rs",
        "driver_refuses_what_schema_allows",
    ),
    (
        "health.check",
        "calls/guest_calls.rs",
        "hostile.rs",
        "hostile_drivers_leave_host_unharmed",
    ),
    (
        "telemetry.read",
        "calls/guest_calls.rs",
        "contract.rs",
        "readings_of_a_guest_are_taken",
    ),
    (
        "scheduling.schedule",
        "calls/guest_calls.rs",
        "contract.rs",
        "additions_of_a_guest_are_taken",
    ),
    (
        "left-out.list-devices",
        "calls/guest_calls.rs",
        "contract.rs",
        "left_out_devices_of_a_guest_are_taken",
    ),
];

/// Call of a guest in which it calls a function of the host.
#[derive(Clone, Copy, PartialEq)]
enum In {
    Discover,
    Prepare,
}

/// An argument as the canonical ABI flattens it.
#[derive(Clone, Copy)]
enum Arg {
    /// A text or bytes.
    Text(&'static str),
    /// So many zeros: an empty list, no option, the first case of an enum.
    Zeros(usize),
}

use Arg::{Text, Zeros};

/// Functions of the host, `interface.function`: when and with which arguments the guest of `each_host_function_answers_a_guest` calls it, and
/// whether it then succeeds.
const IMPORTS: &[(&str, In, &[Arg], bool)] = &[
    (
        "log.write",
        In::Discover,
        &[Zeros(1), Text("a line"), Zeros(2)],
        true,
    ),
    (
        "sysfs.read",
        In::Discover,
        &[Text("devices/card0/vendor")],
        true,
    ),
    (
        "sysfs.read-bytes",
        In::Discover,
        &[Text("devices/card0/binary")],
        true,
    ),
    ("sysfs.read-dir", In::Discover, &[Text("class/net")], true),
    (
        "sysfs.read-link",
        In::Discover,
        &[Text("bus/pci/devices/0000:00:04.0")],
        true,
    ),
    ("sysfs.glob", In::Discover, &[Text("devices/*")], true),
    (
        "sysfs.wait-for",
        In::Discover,
        &[Text("devices/*"), Zeros(1)],
        true,
    ),
    (
        "sysfs-write.write",
        In::Prepare,
        &[Text("devices/card0/numvfs"), Text("4")],
        false,
    ),
    (
        "host-files.read",
        In::Discover,
        &[Text("/usr/share/version")],
        true,
    ),
    (
        "host-files.stat",
        In::Discover,
        &[Text("/usr/share/version")],
        true,
    ),
    (
        "host-files.glob",
        In::Discover,
        &[Text("/usr/share/*")],
        true,
    ),
    (
        "pci-driver.bind",
        In::Prepare,
        &[Text("0000:00:04.0"), Text("vfio-pci")],
        false,
    ),
    (
        "pci-driver.restore",
        In::Prepare,
        &[Text("0000:00:04.0")],
        true,
    ),
    (
        "device-nodes.glob",
        In::Discover,
        &[Text("/dev/card*")],
        true,
    ),
    (
        "device-nodes.wait-for",
        In::Discover,
        &[Text("/dev/card*"), Zeros(1)],
        true,
    ),
    (
        "device-nodes.stat",
        In::Discover,
        &[Text("/dev/pipe")],
        false,
    ),
    ("net-interfaces.all", In::Discover, &[], true),
    ("net-interfaces.get", In::Discover, &[Text("eth9")], false),
    ("prepared-claims.all", In::Discover, &[Zeros(3)], true),
    (
        "prepared-claims.using-device",
        In::Discover,
        &[Text("p"), Text("d"), Zeros(3)],
        true,
    ),
    ("prepared-claims.get", In::Discover, &[Text("u-1")], true),
    (
        "progress.save",
        In::Prepare,
        &[Text("u-1"), Text("half")],
        false,
    ),
];

/// Way of a record.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Way {
    ToHost,
    ToGuest,
    Both,
}

/// Records: `interface.record`, its way, and the file in `src` with all of its fields.
pub(super) const RECORDS: &[(&str, Way, &str)] = &[
    ("claims.claim-ref", Way::ToGuest, "convert.rs"),
    ("claims.allocated-device", Way::ToGuest, "convert.rs"),
    ("claims.opaque-parameters", Way::ToGuest, "convert.rs"),
    ("claims.consumer", Way::ToGuest, "convert.rs"),
    ("claims.claim", Way::ToGuest, "convert.rs"),
    ("claims.condition", Way::ToHost, "convert/prepared.rs"),
    ("claims.network-data", Way::ToHost, "convert/prepared.rs"),
    ("claims.device-status", Way::ToHost, "convert/prepared.rs"),
    ("claims.prepared-device", Way::ToHost, "convert/prepared.rs"),
    ("claims.prepared-claim", Way::ToHost, "convert/prepared.rs"),
    ("claims.prepare-outcome", Way::ToHost, "driver.rs"),
    ("claims.unprepare-outcome", Way::ToHost, "driver.rs"),
    ("claims.claim-record", Way::ToGuest, "convert.rs"),
    ("common.problem", Way::Both, "convert.rs"),
    ("common.key-value", Way::Both, "convert.rs"),
    ("common.context", Way::ToGuest, "driver.rs"),
    (
        "container-edits.device-node",
        Way::ToHost,
        "convert/prepared.rs",
    ),
    ("container-edits.mount", Way::ToHost, "convert/prepared.rs"),
    (
        "container-edits.net-device",
        Way::ToHost,
        "convert/prepared.rs",
    ),
    ("container-edits.hook", Way::ToHost, "convert/prepared.rs"),
    (
        "container-edits.intel-rdt",
        Way::ToHost,
        "convert/prepared.rs",
    ),
    (
        "container-edits.container-edits",
        Way::ToHost,
        "convert/prepared.rs",
    ),
    ("identity.write-request", Way::ToHost, "convert/identity.rs"),
    ("identity.bind-request", Way::ToHost, "convert/identity.rs"),
    ("identity.capabilities", Way::ToHost, "convert/identity.rs"),
    ("identity.limits", Way::ToHost, "convert/identity.rs"),
    ("identity.driver-info", Way::ToHost, "convert/identity.rs"),
    ("health.device-health", Way::ToHost, "convert/inventory.rs"),
    ("telemetry.reading", Way::ToHost, "convert/inventory.rs"),
    (
        "telemetry.device-readings",
        Way::ToHost,
        "convert/inventory.rs",
    ),
    (
        "left-out.left-out-device",
        Way::ToHost,
        "convert/inventory.rs",
    ),
    (
        "scheduling.capacity-mapping",
        Way::ToHost,
        "convert/scheduling.rs",
    ),
    (
        "scheduling.node-allocatable",
        Way::ToHost,
        "convert/scheduling.rs",
    ),
    (
        "scheduling.compatibility",
        Way::ToHost,
        "convert/scheduling.rs",
    ),
    (
        "scheduling.device-scheduling",
        Way::ToHost,
        "convert/scheduling.rs",
    ),
    (
        "scheduling.pool-scheduling",
        Way::ToHost,
        "convert/scheduling.rs",
    ),
    ("scheduling.additions", Way::ToHost, "convert/scheduling.rs"),
    (
        "host-files.file-info",
        Way::ToGuest,
        "host_functions/host_files.rs",
    ),
    (
        "device-nodes.node-info",
        Way::ToGuest,
        "host_functions/nodes.rs",
    ),
    (
        "net-interfaces.net-interface",
        Way::ToGuest,
        "host_functions/net_interfaces.rs",
    ),
    (
        "prepared-claims.page",
        Way::ToGuest,
        "host_functions/hostcalls.rs",
    ),
    ("inventory.attribute", Way::Both, "convert/inventory.rs"),
    (
        "inventory.capacity-range",
        Way::Both,
        "convert/inventory.rs",
    ),
    (
        "inventory.capacity-policy",
        Way::Both,
        "convert/inventory.rs",
    ),
    ("inventory.capacity", Way::Both, "convert/inventory.rs"),
    ("inventory.counter", Way::Both, "convert/inventory.rs"),
    ("inventory.counter-set", Way::Both, "convert/inventory.rs"),
    ("inventory.taint", Way::Both, "convert/inventory.rs"),
    ("inventory.device", Way::Both, "convert/inventory.rs"),
    ("inventory.pool", Way::Both, "convert/inventory.rs"),
    ("inventory.inventory", Way::Both, "convert/inventory.rs"),
];

pub(super) fn contract() -> Resolve {
    let mut resolve = Resolve::default();
    let wit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");
    resolve.push_dir(wit).unwrap();
    resolve
}

pub(super) fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The functions of the interfaces that a driver with every facet imports or exports, as `interface.function`.
fn functions(resolve: &Resolve, is_exported: bool) -> Vec<(String, &Function)> {
    let (_, world) = resolve
        .worlds
        .iter()
        .find(|(_, world)| world.name == "full-driver")
        .unwrap();
    let items = if is_exported {
        &world.exports
    } else {
        &world.imports
    };
    let interfaces = items.iter().map(|(key, item)| match (key, item) {
        (WorldKey::Interface(id), WorldItem::Interface { .. }) => &resolve.interfaces[*id],
        other => panic!("the world has something beside interfaces: {other:?}"),
    });
    let functions = interfaces.flat_map(|interface| {
        let name = interface.name.as_deref().unwrap();
        let functions = interface.functions.iter();
        functions.map(move |(function, it)| (format!("{name}.{function}"), it))
    });
    functions.collect()
}

/// Fails unless a table has each name of the contract once, and no other.
pub(super) fn is_complete<'a>(
    what: &str,
    contract: impl IntoIterator<Item = String>,
    table: impl IntoIterator<Item = &'a str>,
) {
    let contract: BTreeSet<String> = contract.into_iter().collect();
    let rows: Vec<_> = table.into_iter().map(str::to_owned).collect();
    let table: BTreeSet<_> = rows.iter().cloned().collect();
    assert_eq!(rows.len(), table.len(), "a row of {what} is there twice");
    let missing: Vec<_> = contract.difference(&table).collect();
    assert!(
        missing.is_empty(),
        "{what} without a row, and so without a use: {missing:?}"
    );
    let gone: Vec<_> = table.difference(&contract).collect();
    assert!(
        gone.is_empty(),
        "rows of {what} that the contract does not have: {gone:?}"
    );
}

fn snake(name: &str) -> String {
    name.replace('-', "_")
}

fn camel(name: &str) -> String {
    let words = name.split('-').map(|word| {
        let (first, rest) = word.split_at(1);
        first.to_uppercase() + rest
    });
    words.collect()
}

#[test]
fn each_exported_function_has_caller() {
    let resolve = contract();
    let functions = functions(&resolve, true);
    let names = functions.iter().map(|(name, _)| name.clone());
    is_complete("exported functions", names, EXPORTS.iter().map(|row| row.0));
    let plain: Vec<_> = functions
        .iter()
        .map(|(_, function)| &function.name)
        .collect();
    let unique: BTreeSet<_> = plain.iter().collect();
    assert_eq!(
        plain.len(),
        unique.len(),
        "the name of a call is not unique: {plain:?}"
    );
    for (name, file, test_file, test) in EXPORTS {
        let (_, function) = name.split_once('.').unwrap();
        // As the bindings name it.
        let call = format!(".call_{}(", snake(function));
        let source = read(&format!("src/{file}"));
        assert!(source.contains(&call), "{file} does not call {name}");
        let tests = read(&format!("src/tests/{test_file}"));
        let head = format!("async fn {test}() {{");
        assert!(
            tests.contains(&head),
            "{test_file} has no test {test} of {name}"
        );
    }
}

/// A guest that calls a function of the host, and traps if the answer is a problem.
fn asking(resolve: &Resolve, name: &str, function: &Function, when: In, args: &[Arg]) -> Guest {
    const TEXTS: usize = 49_152;
    const ANSWER: usize = 40_960;
    let signature = resolve.wasm_signature(AbiVariant::GuestImport, function);
    let (mut texts, mut values) = (String::new(), Vec::new());
    for arg in args {
        match arg {
            Text(text) => {
                values.extend([TEXTS + texts.len(), text.len()]);
                texts += text;
            }
            Zeros(count) => values.extend(vec![0; *count]),
        }
    }
    if signature.retptr {
        values.push(ANSWER);
    }
    assert_eq!(
        values.len(),
        signature.params.len(),
        "{name}: arguments of the row, and of the contract"
    );
    assert!(
        signature.results.is_empty(),
        "{name} has a result in a register"
    );
    let values: String = values
        .iter()
        .map(|value| format!(" (i32.const {value})"))
        .collect();
    let is_result = function.result.is_some_and(|result| match result {
        wit_parser::Type::Id(id) => matches!(resolve.types[id].kind, TypeDefKind::Result(_)),
        _ => false,
    });
    let check = match is_result {
        true => format!("(if (i32.load8_u (i32.const {ANSWER})) (then unreachable))"),
        false => String::new(),
    };
    let call = format!("(call $asked{values}) {check}");
    let (interface, plain) = name.split_once('.').unwrap();
    let parameters = " i32".repeat(signature.params.len());
    let (discover, prepare) = match when {
        In::Discover => (format!("{call} i32.const 8192"), PREPARE_ONE.to_owned()),
        In::Prepare => {
            let prepare =
                format!("(drop (block (result i32) {PREPARE_ONE})) {call} i32.const 8192");
            ("i32.const 8192".to_owned(), prepare)
        }
    };
    table::asks_host(Guest {
        imports: format!(
            "(import \"nodedock:driver/{interface}@0.2.0\" \"{plain}\" (func $asked (param{parameters})))"
        ),
        extra: format!("(data (i32.const {TEXTS}) \"{texts}\")"),
        discover,
        prepare,
        ..Guest::default()
    })
}

#[tokio::test]
async fn each_host_function_answers_a_guest() {
    let resolve = contract();
    let functions = functions(&resolve, false);
    let names = functions.iter().map(|(name, _)| name.clone());
    is_complete(
        "functions of the host",
        names,
        IMPORTS.iter().map(|row| row.0),
    );
    let stage = node();
    let mut wrong = Vec::new();
    for (name, when, args, succeeds) in IMPORTS {
        let (_, function) = functions.iter().find(|(known, _)| known == name).unwrap();
        let guest = asking(&resolve, name, function, *when, args);
        let driver = stage
            .try_load(guest.module(), table::HOST_GRANT)
            .await
            .unwrap();
        let before = driver.stats().host_operations.get();
        let problem = match when {
            In::Discover => driver.discover(&a_call(), Trigger::Load).await.err(),
            In::Prepare => {
                let mut outcomes = driver.prepare(&a_call(), &[a_claim("u-1")]).await;
                outcomes.remove("u-1").unwrap().err()
            }
        };
        let is_counted = driver.stats().host_operations.get() > before;
        let code = problem.as_ref().map(|problem| problem.code.as_str());
        let wanted = if *succeeds {
            None
        } else {
            Some("driver-trapped")
        };
        if code != wanted || !is_counted {
            wrong.push(format!("{name}: {code:?}, counted: {is_counted}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn additions_of_a_guest_are_taken() {
    let devices = json!([{"name": "p", "devices": [{"name": "d"}]}]);
    let additions =
        json!({"ok": {"devices": [{"pool": "p", "device": "d", "binds-to-node": true}]}});
    let guest = Guest::default().discovers(json!({"ok": {"pools": devices}}));
    let stage = Stage::new();
    let driver = stage.load(&guest.clone().schedules(additions)).await;
    let inventory = driver.discover(&a_call(), Trigger::Load).await.unwrap();
    let device = inventory.pools["p"].devices["d"].clone();
    assert!(device.scheduling.unwrap().binds_to_node);

    let stranger =
        json!({"ok": {"devices": [{"pool": "p", "device": "e", "binds-to-node": true}]}});
    let driver = stage.load(&guest.schedules(stranger)).await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_eq!(problem.code, "driver-answer-not-valid", "{problem}");
}

#[tokio::test]
async fn readings_of_a_guest_are_taken() {
    let stage = Stage::new();
    let reads = |name: &str| {
        let readings = json!([{"name": name, "value": 41.5}]);
        let answer = json!({"ok": [{"pool": "p", "device": "d", "readings": readings}]});
        Guest::default().measures(answer)
    };
    let driver = stage.load(&reads("temperature_celsius")).await;
    let report = driver.read_telemetry(&a_call()).await.unwrap();
    let values: Vec<_> = report.values().flatten().collect();
    assert_eq!(values, [(&"temperature_celsius".to_owned(), &41.5)]);

    let driver = stage.load(&reads("Temperature")).await;
    let problem = driver.read_telemetry(&a_call()).await.unwrap_err();
    assert_eq!(problem.code, "driver-answer-not-valid", "{problem}");
}

#[tokio::test]
async fn left_out_devices_of_a_guest_are_taken() {
    let stage = Stage::new();
    let devices = json!([{"name": "p", "devices": [{"name": "d"}]}]);
    let guest = Guest::default().discovers(json!({"ok": {"pools": devices}}));
    let leaves_out = |name: &str| {
        let answer = json!({"ok": [{"name": name, "reason": "it is a console"}]});
        guest.clone().leaves_out(answer)
    };
    let driver = stage.load(&leaves_out("ttyS0")).await;
    let published = driver.publish(&a_call(), Trigger::Load).await.unwrap();
    assert_eq!(published.inventory.device_count(), 1);
    let left_out = published.left_out;
    let expected = LeftOutDevice::new("ttyS0", "it is a console");
    assert_eq!((left_out.count(), left_out.devices()), (1, &[expected][..]));

    let driver = stage.load(&leaves_out("two\nlines")).await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_eq!(problem.code, "driver-answer-not-valid", "{problem}");
    assert!(problem.message.contains("devices[0]: name"), "{problem}");

    let problem = json!({"kind": "unavailable", "code": "io-error", "message": "no memory"});
    let driver = stage.load(&guest.leaves_out(json!({"err": problem}))).await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_eq!(problem.code, "io-error", "{problem}");
}

/// The records of all interfaces, as `interface.record`, with their fields.
pub(super) fn records(resolve: &Resolve) -> Vec<(String, Vec<String>)> {
    let mut records = Vec::new();
    for (_, interface) in resolve.interfaces.iter() {
        for (name, id) in &interface.types {
            let TypeDefKind::Record(record) = &resolve.types[*id].kind else {
                continue;
            };
            let fields = record.fields.iter().map(|field| snake(&field.name));
            let interface = interface.name.as_deref().unwrap();
            records.push((format!("{interface}.{name}"), fields.collect()));
        }
    }
    records
}

/// The text between the brackets that open after `head`; each place where it is.
fn blocks<'a>(source: &'a str, head: &str, open: char, close: char) -> Vec<&'a str> {
    let places = source.match_indices(head).filter(|(at, _)| {
        let before = source[..*at].chars().next_back();
        before.is_none_or(|before| !before.is_alphanumeric() && before != '_')
    });
    let blocks = places.filter_map(|(at, _)| {
        let text = &source[at + head.len()..];
        let mut depth = 1;
        let end = text.char_indices().find(|(_, it)| {
            depth += i32::from(*it == open) - i32::from(*it == close);
            depth == 0
        });
        Some(&text[..end?.0])
    });
    blocks.collect()
}

/// Whether a literal or pattern has every field, and does not stand for fields by `..`.
fn has_all(block: &str, fields: &[String]) -> bool {
    let words: BTreeSet<_> = block
        .split(|it: char| !it.is_alphanumeric() && it != '_')
        .collect();
    let is_open = block
        .lines()
        .any(|line| line.trim_start().starts_with(".."));
    !is_open && fields.iter().all(|field| words.contains(field.as_str()))
}

#[test]
fn every_record_field_is_converted() {
    let resolve = contract();
    let records = records(&resolve);
    let names = records.iter().map(|(name, _)| name.clone());
    is_complete("records", names, RECORDS.iter().map(|row| row.0));
    let sdk = read("../../sdk/src/wasm/convert.rs");
    let mut wrong = Vec::new();
    for (name, way, file) in RECORDS {
        let (_, fields) = records.iter().find(|(known, _)| known == name).unwrap();
        let symbol = camel(name.split_once('.').unwrap().1);
        let host = read(&format!("src/{file}"));
        let in_host = blocks(&host, &format!("{symbol} {{"), '{', '}');
        if !in_host.iter().any(|block| has_all(block, fields)) {
            wrong.push(format!("src/{file}: not all fields of {name}"));
        }
        // In the SDK by a macro that takes a record apart, or by a pattern.
        let literals = blocks(&sdk, &format!("{symbol} {{"), '{', '}');
        let rules = blocks(&sdk, "same_fields!(", '(', ')');
        let uses = |part: String| {
            let rules = rules.iter().filter(move |rule| rule.contains(&part));
            rules.chain(&literals).any(|block| has_all(block, fields))
        };
        let is_read = uses(format!("::{symbol} =>"));
        let is_written = uses(format!("::{symbol}:"));
        if *way != Way::ToHost && !is_read {
            wrong.push(format!("the SDK does not read all fields of {name}"));
        }
        if *way != Way::ToGuest && !is_written {
            wrong.push(format!("the SDK does not write all fields of {name}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn missing_field_is_found() {
    let fields = ["a".to_owned(), "b_c".to_owned()];
    let source =
        "let x = types::Name { a: 1, b_c };\nlet OtherName { a, .. } = y; Name { a,\n    ..y }";
    let found = blocks(source, "Name {", '{', '}');
    let verdicts: Vec<_> = found.iter().map(|block| has_all(block, &fields)).collect();
    assert_eq!(verdicts, [true, false]);
    assert_eq!(
        (snake("b-c"), camel("b-cd")),
        ("b_c".to_owned(), "BCd".to_owned())
    );
}
