//! Compiles the `.proto` files with `protox`, so that no `protoc` has to be installed.
//!
//! Unrelated APIs of the kubelet share two package names (`v1`, `v1alpha1`), so each API is generated separately, into its own directory
//! under `OUT_DIR`.
//!
//! The messages of the node API that the command line prints implement `serde::Serialize`: [`PRINTED`] and [`PRINTED_FIELDS`] are the
//! definition of `-o json` and `-o yaml`, except for claims, which `get claims` and `explain claim` print by structs of their own.

use std::env;
use std::error::Error;
use std::fs;
use std::path::Path;

use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorProto, FileDescriptorSet};

const ROOT: &str = "proto";
const NODE_API: &str = "nodedock/node/v1/node.proto";
/// Directory under `OUT_DIR`, and file.
const KUBELET_APIS: &[(&str, &str)] = &[
    ("registration", "kubelet/pluginregistration/v1/api.proto"),
    ("dra_v1", "kubelet/dra/v1/api.proto"),
    ("dra_v1alpha2", "kubelet/dra/v1alpha2/api.proto"),
    ("dra_v1alpha3", "kubelet/dra/v1alpha3/api.proto"),
    ("dra_v1beta1", "kubelet/dra/v1beta1/api.proto"),
    ("dra_health_v1", "kubelet/dra_health/v1/api.proto"),
    (
        "dra_health_v1alpha1",
        "kubelet/dra_health/v1alpha1/api.proto",
    ),
    (
        "device_plugin_v1beta1",
        "kubelet/deviceplugin/v1beta1/api.proto",
    ),
    ("pods_v1alpha1", "kubelet/pods/v1alpha1/api.proto"),
    ("pod_resources_v1", "kubelet/podresources/v1/api.proto"),
    (
        "pod_resources_v1alpha1",
        "kubelet/podresources/v1alpha1/api.proto",
    ),
];

/// Those whose messages a recording contains.
const RECORDED_APIS: &[&str] = &[
    "dra_v1",
    "dra_v1alpha2",
    "dra_v1alpha3",
    "dra_v1beta1",
    "dra_health_v1",
    "dra_health_v1alpha1",
    "device_plugin_v1beta1",
];

/// Messages of the node API that the command line prints, with their fields in camel case.
const PRINTED: &[&str] = &[
    "Adapter",
    "Again",
    "Caller",
    "ClaimDriver",
    "ClaimOutcome",
    "Condition",
    "Consumer",
    "ContainerDevices",
    "Device",
    "DeviceNode",
    "Driver",
    "DriverTrust",
    "EndedClaim",
    "ExcludedDevice",
    "KubeletHold",
    "Mount",
    "NodeStatus",
    "ObjectRef",
    "PodStatus",
    "Problem",
    "RefusedClaim",
    "ReleasedClaim",
    "Resource",
    "ResourceOutcome",
    "Retry",
    "SysfsValue",
    "Taint",
    "Transition",
    "UntoldDriver",
    "WaitingClaim",
];

const NO_EMPTY_TEXT: &str = "skip_serializing_if = \"String::is_empty\"";
const NO_EMPTY_LIST: &str = "skip_serializing_if = \"Vec::is_empty\"";
const NO_NULL: &str = "skip_serializing_if = \"Option::is_none\"";
const NO_RETRY: &str = "serialize_with = \"crate::json::problem_without_retry\"";
const AT: &str = "rename = \"at\", serialize_with = \"crate::json::time\"";
/// Fields that are not printed as they are: the `serde` attribute of each.
const PRINTED_FIELDS: &[(&str, &str)] = &[
    (
        "Again.last_at_ms",
        "rename = \"lastAt\", serialize_with = \"crate::json::time\"",
    ),
    ("ClaimDriver.digest", "skip"),
    ("ClaimDriver.gone_devices", NO_EMPTY_LIST),
    ("ClaimDriver.problem", NO_RETRY),
    ("ClaimOutcome.id", "flatten"),
    (
        "Condition.problem",
        "flatten, serialize_with = \"crate::json::condition\"",
    ),
    ("Consumer.api_group", NO_EMPTY_TEXT),
    ("ContainerDevices.conflicts", NO_EMPTY_LIST),
    ("EndedClaim.id", "flatten"),
    ("EndedClaim.at_ms", AT),
    (
        "Device.attributes_json",
        "rename = \"attributes\", serialize_with = \"crate::json::parsed\"",
    ),
    (
        "Device.annotations",
        "skip_serializing_if = \"::std::collections::BTreeMap::is_empty\"",
    ),
    ("Device.extended_resource", NO_EMPTY_TEXT),
    ("Device.health_message", "skip"),
    ("Device.numa_nodes", NO_EMPTY_LIST),
    ("Device.pods", NO_EMPTY_LIST),
    ("Device.taints", NO_EMPTY_LIST),
    (
        "Device.readings",
        "skip_serializing_if = \"::std::collections::BTreeMap::is_empty\"",
    ),
    (
        "Device.more_taint_rules",
        "skip_serializing_if = \"crate::json::is_zero\"",
    ),
    (
        "Driver.name",
        "serialize_with = \"crate::json::text_or_null\"",
    ),
    ("Driver.summary", "skip"),
    ("Driver.parameters", "skip"),
    ("Driver.timeline", "skip"),
    ("Driver.missing_grants", "skip"),
    ("Driver.discovered_ms", "skip"),
    ("Driver.problem", "skip"),
    ("Driver.native", "skip"),
    (
        "Driver.trust",
        "skip_serializing_if = \"crate::json::is_unchecked\"",
    ),
    ("DriverTrust.key", NO_EMPTY_TEXT),
    ("DriverTrust.pin", NO_EMPTY_TEXT),
    ("DriverTrust.reason", NO_EMPTY_TEXT),
    (
        "KubeletHold.since_ms",
        "rename = \"since\", serialize_with = \"crate::json::time\"",
    ),
    ("PodStatus.pod", "flatten"),
    ("PodStatus.resources", NO_EMPTY_LIST),
    ("Problem.retry_after_ms", NO_NULL),
    (
        "Problem.details",
        "skip_serializing_if = \"::std::collections::BTreeMap::is_empty\"",
    ),
    ("RefusedClaim.id", "flatten"),
    ("RefusedClaim.at_ms", AT),
    ("RefusedClaim.problem", NO_RETRY),
    ("ReleasedClaim.id", "flatten"),
    ("ReleasedClaim.at_ms", AT),
    ("Resource.mechanism", NO_EMPTY_TEXT),
    ("Resource.mechanism_reason", NO_EMPTY_TEXT),
    ("Resource.numa_nodes", "skip"),
    ("ResourceOutcome.device_ids", "rename = \"devices\""),
    ("ResourceOutcome.problem", NO_NULL),
    (
        "Retry.at_ms",
        "rename = \"at\", serialize_with = \"crate::json::time_or_null\"",
    ),
    ("SysfsValue.left", NO_NULL),
    ("WaitingClaim.id", "flatten"),
    ("SysfsValue.found", NO_NULL),
    ("SysfsValue.end", NO_EMPTY_TEXT),
    (
        "SysfsValue.problem",
        "skip_serializing_if = \"Option::is_none\", serialize_with = \"crate::json::code_and_message\"",
    ),
    ("Taint.rule", NO_EMPTY_TEXT),
    ("Transition.at_ms", AT),
    ("Transition.problem", NO_RETRY),
    ("Transition.again", NO_NULL),
    ("UntoldDriver.problem", NO_RETRY),
];

/// Fields that are printed elsewhere than where they are declared: message, field, and the field before which it is printed.
const MOVED_FIELDS: &[(&str, &str, &str)] = &[
    ("ClaimDriver", "gone_devices", "cdi_devices"),
    ("ClaimDriver", "version", "devices"),
    ("Consumer", "api_group", "resource"),
    ("PodStatus", "state", "claims"),
    ("PodStatus", "resources", "containers"),
    ("RefusedClaim", "at_ms", "driver"),
    ("RefusedClaim", "problem", "retry"),
    ("ReleasedClaim", "values", "timeline"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={ROOT}");
    let out = env::var("OUT_DIR")?;
    let out = Path::new(&out);

    let mut node_api = protox::compile([NODE_API], [ROOT])?;
    node_api.file.iter_mut().for_each(order_as_printed);
    generate(node_api_config(), node_api, out)?;
    for (directory, file) in KUBELET_APIS {
        let directory = out.join(directory);
        fs::create_dir_all(&directory)?;
        let mut descriptors = protox::compile([file], [ROOT])?;
        suit_rust(&mut descriptors);
        let mut config = prost_build::Config::new();
        if RECORDED_APIS.iter().any(|name| directory.ends_with(name)) {
            config.type_attribute(".", "#[derive(::serde::Serialize)]");
        }
        generate(config, descriptors, &directory)?;
    }

    // Unmodified descriptors, for the tests.
    let files = KUBELET_APIS.iter().map(|(_, file)| file);
    fs::write(
        out.join("kubelet.descriptors"),
        protox::compile(files, [ROOT])?.encode_to_vec(),
    )?;
    Ok(())
}

fn node_api_config() -> prost_build::Config {
    let mut config = prost_build::Config::new();
    for message in PRINTED {
        config.type_attribute(
            message,
            "#[derive(::serde::Serialize)] #[serde(rename_all = \"camelCase\")]",
        );
    }
    for (field, attribute) in PRINTED_FIELDS {
        config.field_attribute(field, format!("#[serde({attribute})]"));
    }
    config
}

fn generate(
    mut config: prost_build::Config,
    descriptors: FileDescriptorSet,
    directory: &Path,
) -> Result<(), Box<dyn Error>> {
    config.enable_type_names();
    // Entries of maps have no comment in the file.
    config.disable_comments(["ClaimsEntry", "ClaimsEntry.key", "ClaimsEntry.value"]);
    // Ordered maps: the same value always has the same bytes.
    let builder = tonic_prost_build::configure()
        .btree_map(".")
        .codec_path("crate::codec::SmallCodec")
        .out_dir(directory);
    Ok(builder.compile_fds_with_config(descriptors, config)?)
}

/// Moves fields of the generated structs, with their comments; the order has no meaning on the wire.
fn order_as_printed(file: &mut FileDescriptorProto) {
    for (message, field, before) in MOVED_FIELDS {
        let index = file
            .message_type
            .iter()
            .position(|found| found.name() == *message);
        let index = index.expect("a moved field is of a message of the file");
        let fields = &mut file.message_type[index].field;
        let find = |name| {
            fields
                .iter()
                .position(|found| found.name() == name)
                .expect("a field of the message")
        };
        let (from, before) = (find(*field), find(*before));
        let to = if from < before { before - 1 } else { before };
        let taken = fields.remove(from);
        fields.insert(to, taken);
        // Path of a field: field 4 of a file is its messages, field 2 of a message is its fields.
        for location in file
            .source_code_info
            .iter_mut()
            .flat_map(|info| &mut info.location)
        {
            if let [4, of, 2, position, ..] = location.path.as_mut_slice()
                && *of as usize == index
            {
                *position = moved(*position as usize, from, to) as i32;
            }
        }
    }
}

/// The position of an element after the one at `from` was moved to `to`.
fn moved(position: usize, from: usize, to: usize) -> usize {
    match position {
        _ if position == from => to,
        _ if from < position && position <= to => position - 1,
        _ if to <= position && position < from => position + 1,
        _ => position,
    }
}

/// Changes the Rust names of the kubelet's APIs, and nothing on the wire.
fn suit_rust(descriptors: &mut FileDescriptorSet) {
    for message in descriptors
        .file
        .iter_mut()
        .flat_map(|file| &mut file.message_type)
    {
        name_ids(message);
        keep_empty_map_values(message);
    }
}

/// `deviceIDs` would become `device_i_ds`.
fn name_ids(message: &mut DescriptorProto) {
    for field in &mut message.field {
        let name = field.name.take().unwrap_or_default();
        field.name = Some(match name.strip_suffix("IDs") {
            Some(stem) => format!("{stem}_ids"),
            None => name,
        });
    }
}

/// prost leaves an empty message out of a map entry, which the protocol allows; but Go programs generated
/// by gogo/protobuf then hold a nil where they expect a message, and kubelets have crashed over it. On the
/// wire a map is a list of entries, and as such a value that is empty is still written.
fn keep_empty_map_values(message: &mut DescriptorProto) {
    for entry in &mut message.nested_type {
        let holds_message = entry.field.iter().any(|field| field.type_name.is_some());
        if let Some(options) = entry.options.as_mut().filter(|_| holds_message) {
            options.map_entry = None;
        }
    }
}
