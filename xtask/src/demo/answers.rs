//! Parses the `-o json` output for the demo. Pure.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

/// Harmless in a container; almost every machine has one of them. The first one found is used.
const WANTED_PATHS: [&str; 3] = ["/dev/fuse", "/dev/kvm", "/dev/net/tun"];
const LOOP_PREFIX: &str = "/dev/loop";

#[derive(Deserialize)]
pub(super) struct DriverRow {
    #[serde(default)]
    source: String,
    pub(super) state: String,
    #[serde(default)]
    pub(super) reason: String,
}

impl DriverRow {
    /// Matches a source that is a file name, or a path that ends in it.
    pub(super) fn is_from(&self, file: &str) -> bool {
        self.source.rsplit('/').next() == Some(file)
    }
}

#[derive(Deserialize)]
pub(super) struct DeviceRow {
    driver: String,
    pool: String,
    name: String,
    #[serde(default)]
    attributes: Value,
    #[serde(default)]
    health: String,
}

impl DeviceRow {
    fn is_usable(&self) -> bool {
        self.health != "unhealthy"
    }

    /// Returns the path from the attribute, plain or wrapped in its type, or from the name.
    fn is_node(&self, path: &str) -> bool {
        mentions(&self.attributes, path)
            || self.name == path.trim_start_matches("/dev/").replace('/', "-")
    }

    fn choice(&self, what: &str) -> Choice {
        let device = format!("{}/{}/{}", self.driver, self.pool, self.name);
        Choice {
            device,
            what: what.to_owned(),
            file: String::new(),
        }
    }
}

fn mentions(value: &Value, text: &str) -> bool {
    match value {
        Value::String(string) => string == text,
        Value::Array(items) => items.iter().any(|item| mentions(item, text)),
        Value::Object(fields) => fields.values().any(|field| mentions(field, text)),
        _ => false,
    }
}

/// The device for the demo.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// `DRIVER/POOL/DEVICE`.
    pub(super) device: String,
    /// Human-readable description.
    pub(super) what: String,
    /// The driver's file.
    pub(super) file: String,
}

pub(super) fn real_device(devices: &[DeviceRow]) -> Option<Choice> {
    let loops = (0..64).map(|number| format!("{LOOP_PREFIX}{number}"));
    WANTED_PATHS
        .into_iter()
        .map(String::from)
        .chain(loops)
        .find_map(|path| {
            let device = devices
                .iter()
                .find(|device| device.is_usable() && device.is_node(&path))?;
            Some(device.choice(&path))
        })
}

pub(super) fn any_device(devices: &[DeviceRow]) -> Option<Choice> {
    let device = devices.iter().find(|device| device.is_usable())?;
    Some(device.choice(&device.name))
}

#[derive(Deserialize)]
pub(super) struct Prepared {
    claims: Vec<ClaimRow>,
    containers: Vec<ContainerRow>,
}

#[derive(Deserialize)]
struct ClaimRow {
    name: String,
    outcome: String,
    #[serde(default)]
    problem: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerRow {
    #[serde(default)]
    cdi_devices: Vec<String>,
}

impl Prepared {
    pub(super) fn check(&self) -> Result<()> {
        for claim in &self.claims {
            ensure!(
                claim.outcome == "prepared",
                "claim {} is {}: {}",
                claim.name,
                claim.outcome,
                claim.problem
            );
        }
        ensure!(
            !self.claims.is_empty(),
            "the output of prepare has no claim"
        );
        ensure!(
            !self.cdi_devices().is_empty(),
            "the output of prepare has no CDI device"
        );
        Ok(())
    }

    pub(super) fn cdi_devices(&self) -> Vec<&str> {
        self.containers
            .iter()
            .flat_map(|container| &container.cdi_devices)
            .map(String::as_str)
            .collect()
    }
}

/// The effects of a CDI spec on a container.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Promise {
    /// Device nodes, as paths in the container.
    pub(super) nodes: Vec<String>,
    /// `NAME=VALUE`.
    pub(super) env: Vec<String>,
}

impl Promise {
    /// Parses the effects of one CDI device (`vendor/class=name`); `None` if the spec is not of that device.
    pub(super) fn read(spec: &str, cdi_device: &str) -> Option<Self> {
        // The daemon's files are JSON after lines of YAML comments.
        let json: String = spec.lines().filter(|line| !line.starts_with('#')).collect();
        let spec: Spec = serde_json::from_str(&json).ok()?;
        let name = cdi_device.strip_prefix(&spec.kind)?.strip_prefix('=')?;
        let device = spec
            .devices
            .into_iter()
            .find(|device| device.name == name)?;
        let mut promise = Self::default();
        for edits in [device.container_edits, spec.container_edits] {
            promise
                .nodes
                .extend(edits.device_nodes.into_iter().map(|node| node.path));
            promise.env.extend(edits.env);
        }
        Some(promise)
    }

    pub(super) fn add(&mut self, other: Self) {
        self.nodes.extend(other.nodes);
        self.env.extend(other.env);
    }

    /// Returns a script that prints each expected effect, and fails if one is missing.
    pub(super) fn script(&self) -> String {
        let mut script = String::from("set -e");
        for node in &self.nodes {
            // A write to a String cannot fail.
            let _ = write!(script, "; ls -l {node}");
        }
        script.push_str("; env");
        script
    }

    /// Compares the output of the script with the expectation and returns the lines to print.
    pub(super) fn seen<'a>(&self, output: &'a str) -> Result<Vec<&'a str>> {
        let nodes = self
            .nodes
            .iter()
            .map(|node| line_with(output, |line| is_node_line(line, node), node));
        let env = self
            .env
            .iter()
            .map(|entry| line_with(output, |line| line == entry, entry));
        nodes.chain(env).collect()
    }
}

fn line_with<'a>(output: &'a str, matches: impl Fn(&str) -> bool, what: &str) -> Result<&'a str> {
    output
        .lines()
        .find(|line| matches(line))
        .with_context(|| format!("the container does not see {what}"))
}

/// Parses a line of `ls -l` for a character or block device.
fn is_node_line(line: &str, path: &str) -> bool {
    line.starts_with(['c', 'b']) && line.split_whitespace().last() == Some(path)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    kind: String,
    devices: Vec<SpecDevice>,
    #[serde(default)]
    container_edits: SpecEdits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    #[serde(default)]
    container_edits: SpecEdits,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct SpecEdits {
    env: Vec<String>,
    device_nodes: Vec<SpecNode>,
}

#[derive(Deserialize)]
struct SpecNode {
    path: String,
}

/// Every path becomes part of a shell line, so only plain characters are allowed.
pub(super) fn check_plain(paths: &[String]) -> Result<()> {
    for path in paths {
        let mut characters = path.chars();
        if !characters.all(|c| c.is_ascii_alphanumeric() || "/-_.:+".contains(c)) {
            bail!("{path:?} is not the path of a device node");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(json: &str) -> Vec<DeviceRow> {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn preferred_path_wins_in_any_order() {
        let devices = devices(
            r#"[{"driver": "d", "pool": "n", "name": "loop3", "attributes": {"path": "/dev/loop3"}},
                {"driver": "d", "pool": "n", "name": "net-tun"},
                {"driver": "d", "pool": "n", "name": "k", "attributes": {"path": {"string": "/dev/kvm"}}}]"#,
        );
        let choice = real_device(&devices).unwrap();
        assert_eq!(
            (choice.device.as_str(), choice.what.as_str()),
            ("d/n/k", "/dev/kvm")
        );
        assert_eq!(real_device(&devices[..2]).unwrap().what, "/dev/net/tun");
        assert_eq!(real_device(&devices[..1]).unwrap().what, "/dev/loop3");
    }

    #[test]
    fn unhealthy_device_is_not_chosen() {
        let devices = devices(
            r#"[{"driver": "d", "pool": "n", "name": "fuse", "health": "unhealthy"},
                {"driver": "d", "pool": "n", "name": "gpu-0", "attributes": null, "health": "unknown"}]"#,
        );
        assert_eq!(real_device(&devices), None);
        assert_eq!(any_device(&devices).unwrap().device, "d/n/gpu-0");
        assert_eq!(any_device(&devices[..1]), None);
    }

    #[test]
    fn driver_is_recognized_by_its_file() {
        let rows: Vec<DriverRow> = serde_json::from_str(
            r#"[{"source": "mock-gpu.wasm", "state": "serving"}, {"source": "/x/pci.wasm", "state": "seen"}]"#,
        )
        .unwrap();
        assert!(rows[0].is_from("mock-gpu.wasm"));
        assert!(rows[1].is_from("pci.wasm"));
        assert!(!rows[0].is_from("gpu.wasm"));
    }

    #[test]
    fn refused_claim_is_an_error() {
        let prepared: Prepared = serde_json::from_str(
            r#"{"pod": {}, "claims": [{"name": "c", "outcome": "refused", "problem": {"message": "taken"}}],
                "containers": []}"#,
        )
        .unwrap();
        assert!(prepared.check().unwrap_err().to_string().contains("taken"));
    }

    #[test]
    fn prepare_needs_claim_and_cdi_device() {
        let read = |json| serde_json::from_str::<Prepared>(json).unwrap();
        assert!(
            read(r#"{"claims": [], "containers": [{"cdiDevices": ["v/c=a"]}]}"#)
                .check()
                .is_err()
        );
        assert!(
            read(r#"{"claims": [{"name": "c", "outcome": "prepared"}], "containers": []}"#)
                .check()
                .is_err()
        );
        let good = r#"{"claims": [{"name": "c", "outcome": "prepared", "problem": null}],
                       "containers": [{"name": "main", "cdiDevices": ["v/c=a", "v/c=b"]}]}"#;
        read(good).check().unwrap();
        assert_eq!(read(good).cdi_devices(), ["v/c=a", "v/c=b"]);
    }

    const SPEC: &str = r##"# nodedock.dev/claim: {"name":"c"}
{"cdiVersion": "0.6.0", "kind": "v.example/node",
        "devices": [{"name": "a", "containerEdits": {"env": ["A=1"], "deviceNodes": [{"path": "/dev/fuse"}]}}],
        "containerEdits": {"env": ["COMMON=yes"]}}"##;

    #[test]
    fn promise_comes_from_its_cdi_device() {
        let promise = Promise::read(SPEC, "v.example/node=a").unwrap();
        assert_eq!(promise.nodes, ["/dev/fuse"]);
        assert_eq!(promise.env, ["A=1", "COMMON=yes"]);
        assert_eq!(promise.script(), "set -e; ls -l /dev/fuse; env");
        assert_eq!(Promise::read(SPEC, "v.example/node=b"), None);
        assert_eq!(Promise::read(SPEC, "other.example/node=a"), None);
        assert_eq!(Promise::read("no json", "v.example/node=a"), None);
    }

    #[test]
    fn unfulfilled_promise_is_an_error() {
        let promise = Promise::read(SPEC, "v.example/node=a").unwrap();
        let node = "crw-rw-rw-    1 0        0          10, 229 Nov 19 23:31 /dev/fuse";
        let output = format!("{node}\nHOME=/\nA=1\nCOMMON=yes\n");
        assert_eq!(promise.seen(&output).unwrap(), [node, "A=1", "COMMON=yes"]);
        assert!(promise.seen("A=1\nCOMMON=yes\n").is_err());
        assert!(promise.seen(&output.replace("A=1", "A=2")).is_err());
        assert!(promise.seen(&output.replace("crw", "-rw")).is_err());
    }

    #[test]
    fn path_with_shell_characters_is_refused() {
        check_plain(&[
            "/dev/net/tun".into(),
            "/dev/dri/by-path/pci-0000:00:02.0-card".into(),
        ])
        .unwrap();
        assert!(check_plain(&["/dev/x; reboot".into()]).is_err());
    }
}
