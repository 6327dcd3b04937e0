//! Compiles the `.proto` files with `protox`, so that no `protoc` has to be installed.
//!
//! Unrelated APIs of the kubelet share two package names (`v1`, `v1alpha1`), so each API is generated separately, into its own directory
//! under `OUT_DIR`.

use std::env;
use std::error::Error;
use std::fs;
use std::path::Path;

use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorSet};

const ROOT: &str = "proto";
const NODE_API: &str = "nodedock/node/v1/node.proto";
/// Directory under `OUT_DIR`, and file.
const KUBELET_APIS: &[(&str, &str)] = &[
    ("registration", "kubelet/pluginregistration/v1/api.proto"),
    ("dra_v1", "kubelet/dra/v1/api.proto"),
    ("dra_v1beta1", "kubelet/dra/v1beta1/api.proto"),
    ("dra_health_v1", "kubelet/dra_health/v1/api.proto"),
    ("dra_health_v1alpha1", "kubelet/dra_health/v1alpha1/api.proto"),
    ("device_plugin_v1beta1", "kubelet/deviceplugin/v1beta1/api.proto"),
    ("pod_resources_v1", "kubelet/podresources/v1/api.proto"),
    ("pod_resources_v1alpha1", "kubelet/podresources/v1alpha1/api.proto"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={ROOT}");
    let out = env::var("OUT_DIR")?;
    let out = Path::new(&out);

    generate(protox::compile([NODE_API], [ROOT])?, out)?;
    for (folder, file) in KUBELET_APIS {
        let folder = out.join(folder);
        fs::create_dir_all(&folder)?;
        let mut descriptors = protox::compile([file], [ROOT])?;
        suit_rust(&mut descriptors);
        generate(descriptors, &folder)?;
    }

    // Unmodified descriptors, for the tests.
    let files = KUBELET_APIS.iter().map(|(_, file)| file);
    fs::write(out.join("kubelet.descriptors"), protox::compile(files, [ROOT])?.encode_to_vec())?;
    Ok(())
}

fn generate(descriptors: FileDescriptorSet, folder: &Path) -> Result<(), Box<dyn Error>> {
    let mut config = prost_build::Config::new();
    config.enable_type_names();
    // Entries of maps have no comment in the file.
    config.disable_comments(["ClaimsEntry", "ClaimsEntry.key", "ClaimsEntry.value"]);
    // Ordered maps: the same value always has the same bytes.
    let builder = tonic_prost_build::configure().btree_map(".").out_dir(folder);
    Ok(builder.compile_fds_with_config(descriptors, config)?)
}

/// Changes the Rust names of the kubelet's APIs, and nothing on the wire.
fn suit_rust(descriptors: &mut FileDescriptorSet) {
    for message in descriptors.file.iter_mut().flat_map(|file| &mut file.message_type) {
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
