//! The operator's grant file.

use serde::{Deserialize, Deserializer, de};

use super::globs::covers;
use crate::{Capabilities, ValueGrant};

/// An operator's grant, parsed from YAML or JSON by any serde format: `serde_json::from_str::<Grant>(text)`. It refuses unknown keys,
/// as the host does.
///
/// ```
/// use nodedock_sdk::{DriverInfo, testing::Grant};
///
/// let grant: Grant = serde_json::from_str(
///     r#"{"apiVersion": "nodedock.dev/v1", "kind": "DriverGrant", "deviceNodes": ["/dev/fuse"]}"#,
/// )?;
/// let info = DriverInfo::new("a.example.com", "0.1.0").device_nodes(["/dev/fuse", "/dev/kvm"]);
/// assert_eq!(grant.missing(&info.capabilities), ["deviceNodes: /dev/kvm"]);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Granted capabilities.
    pub capabilities: Capabilities,
}

impl Grant {
    /// Returns the requested capabilities that are not granted, one line each; the host keeps the driver `blocked` while there is any.
    pub fn missing(&self, requested: &Capabilities) -> Vec<String> {
        let granted = &self.capabilities;
        let lists = [
            ("sysfsRead", &granted.sysfs_read, &requested.sysfs_read),
            ("deviceNodes", &granted.device_nodes, &requested.device_nodes),
            ("mounts", &granted.mounts, &requested.mounts),
            ("hooks", &granted.hooks, &requested.hooks),
            ("env", &granted.env, &requested.env),
            ("netDevices", &granted.net_devices, &requested.net_devices),
        ];
        let plain = lists.into_iter().flat_map(|(key, granted, requested)| {
            requested.iter().filter(|glob| !covers(granted, glob)).map(move |glob| format!("{key}: {glob}"))
        });
        let writes = requested.sysfs_write.iter().filter(|write| !granted.covers_write(write));
        plain.chain(writes.map(|write| format!("sysfsWrite: {} {}", write.glob, write.pattern))).collect()
    }
}

impl Capabilities {
    /// Patterns cannot be compared by what they match, so they must be equal.
    fn covers_write(&self, requested: &ValueGrant) -> bool {
        let same_pattern = self.sysfs_write.iter().filter(|granted| granted.pattern == requested.pattern);
        let globs: Vec<_> = same_pattern.map(|granted| granted.glob.clone()).collect();
        covers(&globs, &requested.glob)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GrantFile {
    api_version: String,
    kind: String,
    #[serde(default)]
    sysfs_read: Vec<String>,
    #[serde(default)]
    sysfs_write: Vec<ValueGrantFile>,
    #[serde(default)]
    device_nodes: Vec<String>,
    #[serde(default)]
    mounts: Vec<String>,
    #[serde(default)]
    hooks: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
    #[serde(default)]
    net_devices: Vec<String>,
    #[serde(default, rename = "limits")]
    _limits: LimitsFile,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ValueGrantFile {
    glob: String,
    pattern: String,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LimitsFile {
    #[serde(rename = "memoryMiB")]
    _memory_mib: Option<u32>,
    #[serde(rename = "wallMs")]
    _wall_ms: Option<u32>,
    #[serde(rename = "cpuMs")]
    _cpu_ms: Option<u32>,
    #[serde(rename = "answerMiB")]
    _answer_mib: Option<u32>,
    #[serde(rename = "hostOperations")]
    _host_operations: Option<u32>,
    #[serde(rename = "hostMiB")]
    _host_mib: Option<u32>,
    #[serde(rename = "logLinesPerSecond")]
    _log_lines_per_second: Option<u32>,
    #[serde(rename = "logBytesPerSecond")]
    _log_bytes_per_second: Option<u32>,
    #[serde(rename = "concurrentCalls")]
    _concurrent_calls: Option<u32>,
}

impl<'de> Deserialize<'de> for Grant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let file = GrantFile::deserialize(deserializer)?;
        if (file.api_version.as_str(), file.kind.as_str()) != ("nodedock.dev/v1", "DriverGrant") {
            return Err(de::Error::custom("expected apiVersion nodedock.dev/v1 and kind DriverGrant"));
        }
        let write = |write: ValueGrantFile| ValueGrant { glob: write.glob, pattern: write.pattern };
        Ok(Grant {
            capabilities: Capabilities {
                sysfs_read: file.sysfs_read,
                sysfs_write: file.sysfs_write.into_iter().map(write).collect(),
                device_nodes: file.device_nodes,
                mounts: file.mounts,
                hooks: file.hooks,
                env: file.env,
                net_devices: file.net_devices,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DriverInfo;
    use serde_json::{from_value, json};

    fn file(mut content: serde_json::Value) -> serde_json::Value {
        content["apiVersion"] = "nodedock.dev/v1".into();
        content["kind"] = "DriverGrant".into();
        content
    }

    #[test]
    fn a_whole_file_is_read() {
        let grant: Grant = from_value(file(json!({
            "sysfsRead": ["class/misc/*/dev"],
            "sysfsWrite": [{"glob": "class/net/*/x", "pattern": "[0-9]"}],
            "deviceNodes": ["/dev/fuse"], "mounts": [], "hooks": [], "env": ["A_*"], "netDevices": ["eth*"],
            "limits": {
                "memoryMiB": 64, "wallMs": 10000, "cpuMs": 2000, "answerMiB": 16, "hostOperations": 1000,
                "hostMiB": 16, "logLinesPerSecond": 50, "logBytesPerSecond": 65536, "concurrentCalls": 16
            }
        })))
        .unwrap();
        assert_eq!(grant.capabilities.sysfs_write[0].pattern, "[0-9]");
        assert_eq!(grant.capabilities.net_devices, ["eth*"]);
    }

    #[test]
    fn another_kind_and_a_mistyped_key_are_refused() {
        let other = json!({"apiVersion": "v1", "kind": "ConfigMap"});
        assert!(from_value::<Grant>(other).unwrap_err().to_string().contains("DriverGrant"));
        let mistyped = file(json!({"deviceNode": ["/dev/fuse"]}));
        assert!(from_value::<Grant>(mistyped).unwrap_err().to_string().contains("deviceNode"));
    }

    #[test]
    fn a_write_is_covered_only_with_its_pattern() {
        let grant: Grant =
            from_value(file(json!({"sysfsWrite": [{"glob": "class/net/*/x", "pattern": "[0-9]"}]}))).unwrap();
        let request = |glob, pattern| DriverInfo::new("a", "1.0.0").sysfs_write(glob, pattern).capabilities;
        assert_eq!(grant.missing(&request("class/net/eth0/x", "[0-9]")), Vec::<String>::new());
        assert_eq!(grant.missing(&request("class/net/eth0/x", ".*")), ["sysfsWrite: class/net/eth0/x .*"]);
        assert_eq!(grant.missing(&request("class/**", "[0-9]")), ["sysfsWrite: class/** [0-9]"]);
    }
}
