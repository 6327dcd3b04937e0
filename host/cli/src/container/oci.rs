//! The configuration of a container (`config.json` of the OCI runtime specification) as JSON, and container edits in it. Fields that this
//! release does not know stay as they are, which typed values of a library would drop.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use anyhow::{Context, Result, bail};
use nodedock_model::{DeviceNode, Edits, Hook, Mount, NodeKind};
use serde_json::{Map, Value, json};

/// Applies container edits as CDI's own library does (`ContainerEdits.Apply` of `tags.cncf.io/container-device-interface/pkg/cdi`).
///
/// # Errors
///
/// The configuration has another type at a place of an edit, or a device node is not on the node.
pub(super) fn apply(config: &mut Value, edits: &Edits) -> Result<()> {
    for (name, value) in &edits.env {
        set_variable(config, name, value)?;
    }
    for node in &edits.device_nodes {
        let shown = node.node_path();
        add_device(config, node).with_context(|| format!("add device node {shown}"))?;
    }
    for device in &edits.net_devices {
        let devices = object(config, &["linux", "netDevices"])?;
        let name = json!({ "name": device.container_interface });
        devices.insert(device.host_interface.clone(), name);
    }
    for mount in &edits.mounts {
        add_mount(config, mount)?;
    }
    if !edits.mounts.is_empty() {
        // A mount below another one has to come after it.
        list(config, &["mounts"])?.sort_by_key(|mount| depth(text(mount, "destination")));
    }
    for hook in &edits.hooks {
        list(config, &["hooks", &hook.stage])?.push(hook_value(hook));
    }
    if let Some(rdt) = &edits.intel_rdt {
        let rdt = serde_json::to_value(rdt).context("write intelRdt")?;
        object(config, &["linux"])?.insert("intelRdt".to_owned(), rdt);
    }
    for gid in edits.additional_gids.iter().filter(|gid| **gid != 0) {
        let gids = list(config, &["process", "user", "additionalGids"])?;
        let gid = Value::from(*gid);
        if !gids.contains(&gid) {
            gids.push(gid);
        }
    }
    Ok(())
}

/// Returns an object of the configuration, which is made if there is none.
fn object<'a>(config: &'a mut Value, path: &[&str]) -> Result<&'a mut Map<String, Value>> {
    let place = place(config, path)?;
    if place.is_null() {
        *place = json!({});
    }
    let found = place.as_object_mut();
    found.with_context(|| format!("{} is no object", path.join(".")))
}

/// Returns a list of the configuration, which is made if there is none.
fn list<'a>(config: &'a mut Value, path: &[&str]) -> Result<&'a mut Vec<Value>> {
    let place = place(config, path)?;
    if place.is_null() {
        *place = json!([]);
    }
    let found = place.as_array_mut();
    found.with_context(|| format!("{} is no list", path.join(".")))
}

fn place<'a>(config: &'a mut Value, path: &[&str]) -> Result<&'a mut Value> {
    let mut place = config;
    for (at, field) in path.iter().enumerate() {
        if place.is_null() {
            *place = json!({});
        }
        let Some(object) = place.as_object_mut() else {
            bail!("{} is no object", path[..at].join("."));
        };
        place = object.entry(*field).or_insert(Value::Null);
    }
    Ok(place)
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn depth(path: &str) -> usize {
    path.split('/').filter(|part| !part.is_empty()).count()
}

fn set_variable(config: &mut Value, name: &str, value: &str) -> Result<()> {
    let variables = list(config, &["process", "env"])?;
    let variable = Value::from(format!("{name}={value}"));
    let same = |known: &&mut Value| {
        let known = known.as_str().and_then(|known| known.split_once('='));
        known.is_some_and(|(known, _)| known == name)
    };
    match variables.iter_mut().find(same) {
        Some(known) => *known = variable,
        None => variables.push(variable),
    }
    Ok(())
}

fn add_device(config: &mut Value, node: &DeviceNode) -> Result<()> {
    let node = complete(node)?;
    // A pipe has no numbers.
    let (major, minor) = (
        node.major.unwrap_or_default(),
        node.minor.unwrap_or_default(),
    );
    let kind = node.kind;
    let user = |field: &str| {
        let id = config.pointer(&format!("/process/user/{field}"));
        let id = id.and_then(Value::as_u64).filter(|id| *id > 0);
        id.and_then(|id| u32::try_from(id).ok())
    };
    let (uid, gid) = (
        node.uid.or_else(|| user("uid")),
        node.gid.or_else(|| user("gid")),
    );
    let mut device = json!({ "path": node.path, "type": kind, "major": major, "minor": minor });
    let optional = [("fileMode", node.file_mode), ("uid", uid), ("gid", gid)];
    for (field, value) in optional {
        if let Some(value) = value {
            device[field] = value.into();
        }
    }
    let devices = list(config, &["linux", "devices"])?;
    devices.retain(|known| text(known, "path") != node.path);
    devices.push(device);
    if kind != Some(NodeKind::Fifo) {
        let rule = json!({ "allow": true, "type": kind, "major": major, "minor": minor, "access": node.permissions });
        list(config, &["linux", "resources", "devices"])?.push(rule);
    }
    Ok(())
}

/// Returns a device node with its type and numbers, from the node of the machine if the edits have none.
fn complete(node: &DeviceNode) -> Result<DeviceNode> {
    let mut node = node.clone();
    let is_numbered = node.major.is_some() && node.minor.is_some();
    if node.kind == Some(NodeKind::Fifo) || (node.kind.is_some() && is_numbered) {
        return Ok(node);
    }
    let found = std::fs::metadata(node.node_path()).context("look at it")?;
    let kind = kind_of(&found).context("it is no device node")?;
    if node.kind.is_some_and(|given| given != kind) {
        bail!("it is a node of another type");
    }
    node.kind = Some(kind);
    if kind != NodeKind::Fifo && !is_numbered {
        node.major = Some(rustix::fs::major(found.rdev()));
        node.minor = Some(rustix::fs::minor(found.rdev()));
    }
    Ok(node)
}

fn kind_of(found: &Metadata) -> Option<NodeKind> {
    let kind = found.file_type();
    if kind.is_char_device() {
        Some(NodeKind::Character)
    } else if kind.is_block_device() {
        Some(NodeKind::Block)
    } else {
        kind.is_fifo().then_some(NodeKind::Fifo)
    }
}

fn add_mount(config: &mut Value, mount: &Mount) -> Result<()> {
    let mut added = json!({
        "destination": mount.container_path, "source": mount.host_path, "options": mount.options,
    });
    if let Some(fs_type) = &mount.fs_type {
        added["type"] = fs_type.clone().into();
    }
    let mounts = list(config, &["mounts"])?;
    mounts.retain(|known| text(known, "destination") != mount.container_path);
    mounts.push(added);
    Ok(())
}

fn hook_value(hook: &Hook) -> Value {
    let mut value = json!({ "path": hook.path });
    if !hook.args.is_empty() {
        value["args"] = hook.args.clone().into();
    }
    if !hook.env.is_empty() {
        let env = hook.env.iter();
        value["env"] = env.map(|(name, value)| format!("{name}={value}")).collect();
    }
    if let Some(timeout) = hook.timeout_seconds {
        value["timeout"] = timeout.into();
    }
    value
}

/// Takes the hooks of a stage for whose arguments `is_taken` holds out of the configuration, and returns these arguments.
pub(super) fn take_hooks(
    config: &mut Value,
    stage: &str,
    is_taken: impl Fn(&[String]) -> bool,
) -> Result<Vec<Vec<String>>> {
    if config["hooks"][stage].is_null() {
        return Ok(Vec::new());
    }
    let mut taken = Vec::new();
    list(config, &["hooks", stage])?.retain(|hook| {
        let args = hook["args"].as_array().into_iter().flatten();
        let args: Vec<_> = args
            .filter_map(|arg| arg.as_str().map(str::to_owned))
            .collect();
        let takes = is_taken(&args);
        if takes {
            taken.push(args);
        }
        !takes
    });
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(json: Value) -> Edits {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn edits_are_applied_as_cdi_does() {
        let mut config = json!({
            "process": { "env": ["PATH=/bin", "A=old"], "user": { "uid": 1000, "gid": 0, "additionalGids": [5] } },
            "mounts": [{ "destination": "/data/x", "source": "/s" }, { "destination": "/b", "source": "/old" }],
            "hooks": { "poststop": [{ "path": "/bin/kept" }] },
            "linux": { "devices": [{ "path": "/dev/a", "type": "b" }], "future": true },
            "future": [1],
        });
        apply(&mut config, &edits(json!({
            "env": ["A=new", "B=1=2"],
            "deviceNodes": [
                { "path": "/dev/a", "type": "c", "major": 1, "minor": 3, "permissions": "rw", "fileMode": 438 },
                { "path": "/dev/n", "hostPath": "/dev/null", "permissions": "none", "gid": 7 },
                { "path": "/dev/fifo", "type": "p", "permissions": "r" },
            ],
            "netDevices": [{ "hostInterfaceName": "eth1", "name": "net0" }],
            "mounts": [{ "hostPath": "/h", "containerPath": "/b", "options": ["ro", "bind"] },
                       { "hostPath": "/t", "containerPath": "/", "type": "tmpfs" }],
            "hooks": [{ "hookName": "poststop", "path": "/bin/h", "args": ["h", "x"], "env": ["E=1"], "timeout": 3 }],
            "intelRdt": { "closID": "c" },
            "additionalGids": [0, 5, 6],
        }))).unwrap();
        assert_eq!(
            config,
            json!({
                "process": { "env": ["PATH=/bin", "A=new", "B=1=2"],
                    "user": { "uid": 1000, "gid": 0, "additionalGids": [5, 6] } },
                "mounts": [
                    { "destination": "/", "source": "/t", "options": [], "type": "tmpfs" },
                    { "destination": "/b", "source": "/h", "options": ["ro", "bind"] },
                    { "destination": "/data/x", "source": "/s" },
                ],
                "hooks": { "poststop": [{ "path": "/bin/kept" },
                    { "path": "/bin/h", "args": ["h", "x"], "env": ["E=1"], "timeout": 3 }] },
                "linux": {
                    "devices": [
                        { "path": "/dev/a", "type": "c", "major": 1, "minor": 3, "fileMode": 438, "uid": 1000 },
                        { "path": "/dev/n", "type": "c", "major": 1, "minor": 3, "uid": 1000, "gid": 7 },
                        { "path": "/dev/fifo", "type": "p", "major": 0, "minor": 0, "uid": 1000 },
                    ],
                    "resources": { "devices": [
                        { "allow": true, "type": "c", "major": 1, "minor": 3, "access": "rw" },
                        { "allow": true, "type": "c", "major": 1, "minor": 3, "access": "" },
                    ] },
                    "netDevices": { "eth1": { "name": "net0" } },
                    "intelRdt": { "closID": "c" },
                    "future": true,
                },
                "future": [1],
            })
        );
    }

    #[test]
    fn unusable_places_and_nodes_are_named() {
        let node = |path: &str| json!({ "deviceNodes": [{ "path": path, "permissions": "rw" }] });
        for (config, change, words) in [
            (
                json!({ "process": { "env": "A=1" } }),
                json!({ "env": ["A=2"] }),
                "process.env is no list",
            ),
            (
                json!({ "process": 7 }),
                json!({ "env": ["A=2"] }),
                "process is no object",
            ),
            (
                json!({}),
                node("/etc/passwd"),
                "/etc/passwd: it is no device node",
            ),
            (json!({}), node("/dev/none"), "/dev/none: look at it"),
            (
                json!({}),
                json!({ "deviceNodes": [{ "path": "/dev/null", "type": "b", "permissions": "r" }] }),
                "another type",
            ),
        ] {
            let mut config = config;
            let error = format!("{:#}", apply(&mut config, &edits(change)).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn hooks_are_taken_by_their_arguments() {
        let mut config = json!({ "hooks": { "createRuntime": [
            { "path": "/a", "args": ["a", "mine"] }, { "path": "/b" }, { "path": "/c", "args": ["c"] },
        ] } });
        let taken = take_hooks(&mut config, "createRuntime", |args| args.len() == 2).unwrap();
        assert_eq!(taken, [["a", "mine"]]);
        let left = json!([{ "path": "/b" }, { "path": "/c", "args": ["c"] }]);
        assert_eq!(config["hooks"]["createRuntime"], left);
        assert!(
            take_hooks(&mut config, "poststop", |_| true)
                .unwrap()
                .is_empty()
        );
        assert_eq!(config["hooks"].get("poststop"), None);
    }
}
