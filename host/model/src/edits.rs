//! Container edits: the changes to a container that uses a device, with CDI's meanings (tags.cncf.io/container-device-interface, 0.3.0 to
//! 1.1.0). Their JSON is CDI's too, in spec files and in records.

use serde::{Deserialize, Serialize};

use super::exact;

/// Changes of a container by a device, or by a claim as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Edits {
    /// Names and values.
    #[serde(with = "variables", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<(String, String)>,
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub net_devices: Vec<NetDevice>,
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub hooks: Vec<Hook>,
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub additional_gids: Vec<u32>,
}

impl Edits {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds other edits after these. Of a class of Intel RDT the first counts.
    pub fn extend(&mut self, more: Self) {
        self.env.extend(more.env);
        self.device_nodes.extend(more.device_nodes);
        self.net_devices.extend(more.net_devices);
        self.hooks.extend(more.hooks);
        self.mounts.extend(more.mounts);
        self.intel_rdt = self.intel_rdt.take().or(more.intel_rdt);
        self.additional_gids.extend(more.additional_gids);
    }

    /// Returns the lowest version of CDI that has every field that is used.
    pub fn cdi_version(&self) -> CdiVersion {
        let rdt = self.intel_rdt.as_ref();
        if !self.net_devices.is_empty()
            || rdt.is_some_and(|rdt| !rdt.schemata.is_empty() || rdt.enable_monitoring)
        {
            return CdiVersion::V1_1_0;
        }
        if rdt.is_some() || !self.additional_gids.is_empty() {
            return CdiVersion::V0_7_0;
        }
        if self
            .device_nodes
            .iter()
            .any(|node| is_given(&node.host_path))
        {
            return CdiVersion::V0_5_0;
        }
        if self.mounts.iter().any(|mount| is_given(&mount.fs_type)) {
            return CdiVersion::V0_4_0;
        }
        CdiVersion::V0_3_0
    }
}

fn is_given(text: &Option<String>) -> bool {
    text.as_ref().is_some_and(|text| !text.is_empty())
}

/// A version of the CDI specification that brought a field of the edits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CdiVersion {
    V0_3_0,
    V0_4_0,
    V0_5_0,
    V0_7_0,
    V1_1_0,
}

impl CdiVersion {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_4_0 => "0.4.0",
            Self::V0_5_0 => "0.5.0",
            Self::V0_7_0 => "0.7.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeKind {
    #[serde(rename = "c")]
    Character,
    #[serde(rename = "b")]
    Block,
    #[serde(rename = "p")]
    Fifo,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the node; `None` means the same path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Type and numbers: from the driver, and after the host's check from the node.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<NodeKind>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Subset of `rwm`. CDI writes `none` for the empty one: an empty text there, or none, means all.
    #[serde(with = "permissions", default = "permissions::all")]
    pub permissions: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

impl DeviceNode {
    /// Returns the node of a path, for reading and writing, without facts of which the node knows better.
    pub fn at(path: &str) -> Self {
        Self {
            path: path.to_owned(),
            host_path: None,
            kind: None,
            major: None,
            minor: None,
            file_mode: None,
            permissions: "rw".to_owned(),
            uid: None,
            gid: None,
        }
    }

    /// Returns the path on the node.
    pub fn node_path(&self) -> &str {
        self.host_path.as_deref().unwrap_or(&self.path)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetDevice {
    #[serde(rename = "hostInterfaceName")]
    pub host_interface: String,
    #[serde(rename = "name")]
    pub container_interface: String,
}

/// A program of the node that the container runtime runs as root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// `prestart`, `createRuntime`, `createContainer`, `startContainer`, `poststart` or `poststop` (OCI runtime specification).
    #[serde(rename = "hookName")]
    pub stage: String,
    pub path: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    #[serde(default, with = "variables", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<(String, String)>,
    #[serde(rename = "timeout", default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub fs_type: Option<String>,
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub options: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IntelRdt {
    #[serde(rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub schemata: Vec<String>,
    /// False is a runtime's default, and is not written: the field needs CDI 1.1.0.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub enable_monitoring: bool,
}

/// Environment variables as `NAME=VALUE`.
mod variables {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        variables: &[(String, String)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(
            variables
                .iter()
                .map(|(name, value)| format!("{name}={value}")),
        )
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(String, String)>, D::Error> {
        let entries = Vec::<String>::deserialize(deserializer)?;
        let variables = entries.iter().map(|entry| match entry.split_once('=') {
            Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
            None => Err(D::Error::custom(format_args!(
                "the environment entry {entry:?} is not NAME=VALUE"
            ))),
        });
        let mut variables = variables.collect::<Result<Vec<_>, _>>()?;
        variables.shrink_to_fit();
        Ok(variables)
    }
}

/// Permissions of a device node as in CDI.
mod permissions {
    use serde::{Deserialize, Deserializer, Serializer};

    const NONE: &str = "none";

    pub(super) fn serialize<S: Serializer>(subset: &str, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(if subset.is_empty() { NONE } else { subset })
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<String, D::Error> {
        let subset = String::deserialize(deserializer)?;
        Ok(match subset.as_str() {
            NONE => String::new(),
            "" => all(),
            _ => subset,
        })
    }

    pub(super) fn all() -> String {
        "rwm".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn edits_round_trip_as_cdi() {
        let edits = Edits {
            env: vec![("A".into(), "1=2".into()), ("B".into(), String::new())],
            device_nodes: vec![
                DeviceNode {
                    host_path: Some("/dev/host".into()),
                    kind: Some(NodeKind::Block),
                    ..DeviceNode::at("/dev/inside")
                },
                DeviceNode {
                    permissions: String::new(),
                    ..DeviceNode::at("/dev/none")
                },
            ],
            net_devices: vec![NetDevice {
                host_interface: "eth1".into(),
                container_interface: "net0".into(),
            }],
            hooks: vec![Hook {
                stage: "poststop".into(),
                path: "/bin/hook".into(),
                args: Vec::new(),
                env: vec![("C".into(), "3".into())],
                timeout_seconds: Some(5),
            }],
            mounts: vec![Mount {
                host_path: "/a".into(),
                container_path: "/b".into(),
                fs_type: Some("tmpfs".into()),
                options: vec!["ro".into()],
            }],
            intel_rdt: Some(IntelRdt::default()),
            additional_gids: vec![7],
        };
        let json = serde_json::to_string(&edits).unwrap();
        let expected = concat!(
            r#"{"env":["A=1=2","B="],"#,
            r#""deviceNodes":[{"path":"/dev/inside","hostPath":"/dev/host","type":"b","permissions":"rw"},"#,
            r#"{"path":"/dev/none","permissions":"none"}],"#,
            r#""netDevices":[{"hostInterfaceName":"eth1","name":"net0"}],"#,
            r#""hooks":[{"hookName":"poststop","path":"/bin/hook","env":["C=3"],"timeout":5}],"#,
            r#""mounts":[{"hostPath":"/a","containerPath":"/b","type":"tmpfs","options":["ro"]}],"#,
            r#""intelRdt":{},"additionalGids":[7]}"#,
        );
        assert_eq!(json, expected);
        assert_eq!(read::<Edits>(&json), Ok(edits));
    }

    #[test]
    fn absent_permissions_are_all_of_them() {
        for json in [
            r#"{"path":"/dev/a"}"#,
            r#"{"path":"/dev/a","permissions":""}"#,
        ] {
            assert_eq!(read::<DeviceNode>(json).unwrap().permissions, "rwm");
        }
    }

    #[test]
    fn invalid_environment_entry_is_named() {
        let error = read::<Edits>(r#"{"env":["A=1","B"]}"#).unwrap_err();
        assert!(
            error.contains(r#"environment entry "B" is not NAME=VALUE"#),
            "{error}"
        );
        let error =
            read::<DeviceNode>(r#"{"path":"/dev/a","permissions":"r","type":"x"}"#).unwrap_err();
        assert!(error.contains("unknown variant `x`"), "{error}");
        read::<DeviceNode>(r#"{"path":"/dev/a","permissions":"r","major":-1}"#).unwrap_err();
    }
}
