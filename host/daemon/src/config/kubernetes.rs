//! Configuration of a daemon on a Kubernetes node: flags, the section `kubernetes` of the config file, and defaults.
//!
//! Only values, checked: a value that is missing and has no default is an error that names it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::{binding, overhead, values};
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_kube::extended_resources::MechanismSetting;
use nodedock_kube::slices::{BindingRule, Overhead, SliceSettings};
use nodedock_model::{ObjectName, PoolName, PoolNames, limit};

/// The section of the config file. It has no UID of the instance, because all pods of a DaemonSet share the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KubernetesSection {
    /// True if this is a Kubernetes node; false unless set.
    pub enabled: Option<bool>,
    /// The kubelet's root directory; `ROOT/var/lib/kubelet` unless set.
    #[serde(deserialize_with = "values::absolute")]
    pub kubelet_root: Option<PathBuf>,
    /// Kubeconfig for the API server; the service account of the pod unless set.
    #[serde(deserialize_with = "values::absolute")]
    pub kubeconfig: Option<PathBuf>,
    /// Requests to the API server in a second.
    #[serde(deserialize_with = "values::within::<_, _, 1, { limit::API_PER_SECOND_MAX as u64 }>")]
    pub requests_per_second: Option<u32>,
    /// Requests at once after a pause.
    #[serde(deserialize_with = "values::within::<_, _, 1, { limit::API_BURST_MAX as u64 }>")]
    pub request_burst: Option<u32>,
    /// Seconds that a device has to be unhealthy until its pods are evicted; they are not unless set.
    #[serde(deserialize_with = "values::within::<_, _, 1, 604_800>")]
    pub evict_unhealthy_after_seconds: Option<u64>,
    /// Overhead of devices in resources of the node.
    #[serde(deserialize_with = "overhead::rules")]
    pub overhead: Vec<Overhead>,
    /// Devices that have to be prepared before their pod is bound.
    #[serde(deserialize_with = "binding::rules")]
    pub binding_conditions: Vec<BindingRule>,
    /// True if the attribute of a device's NUMA node is a list: the cluster has list attributes (`DRAListTypeAttributes`).
    pub numa_node_list: Option<bool>,
    /// Mechanism by which pools with an extended-resource name are offered; chosen by the versions of API server and kubelet unless set.
    pub extended_resources: Option<MechanismSetting>,
}

/// Flags and environment variables, which win over the section.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct KubernetesFlags {
    /// Run on a Kubernetes node: offer the drivers to its kubelet, and read claims from the API server
    #[arg(id = "kubernetes", long = "kubernetes", env = "NODEDOCK_KUBERNETES", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub enabled: Option<bool>,
    /// The kubelet's root directory [default: ROOT/var/lib/kubelet]
    #[arg(long, value_name = "DIR", env = "NODEDOCK_KUBELET_ROOT")]
    pub kubelet_root: Option<PathBuf>,
    /// Kubeconfig for the API server [default: the service account of the pod]
    #[arg(long, value_name = "FILE", env = "NODEDOCK_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// The pod in which the daemon runs: a kubelet that does not list it does not list all of its pods yet
    #[arg(long, value_name = "NAMESPACE/NAME", env = "NODEDOCK_POD")]
    pub pod: Option<String>,
}

/// The configuration of a daemon on a Kubernetes node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// Name that the node has in the API server.
    pub node_name: ObjectName,
    pub kubelet_root: PathBuf,
    /// None: the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace and name of the pod in which the daemon runs. None: it runs in no pod, or was not given its name.
    pub own_pod: Option<(ObjectName, ObjectName)>,
    pub requests_per_second: u32,
    pub request_burst: u32,
    pub numa_node_form: NumaNodeForm,
    pub extended_resources: MechanismSetting,
    pub slices: SliceSettings,
}

/// Why the flags and the config of a Kubernetes node, or of the local API, cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    #[error("--kubernetes needs the name of this node as the API server has it")]
    NoNodeName,
    #[error("{name:?} is not the name of a node: {rule}")]
    NodeName { name: String, rule: String },
    #[error("the kubelet's root directory {0:?} is not an absolute path")]
    KubeletRoot(PathBuf),
    #[error("--pod {0:?} is not of the form NAMESPACE/NAME")]
    Pod(String),
    #[error("{0} has no effect without --kubernetes")]
    Stray(&'static str),
    #[error("--local-api and --kubernetes exclude one another")]
    LocalApiInCluster,
    #[error("--local-api-listen has no effect without --local-api")]
    ListensToNothing,
    #[error(
        "localApi.devicesPerUser and devicesPerUserAndClass have no effect without localApi.group"
    )]
    QuotaWithoutGroup,
    #[error("the local API listens on loopback addresses alone, and {0} is none")]
    NotLoopback(SocketAddr),
    #[error("{key} of the config names the group {name:?}: {why}")]
    Group {
        key: &'static str,
        name: String,
        why: String,
    },
    #[error("the path {path} has {length} bytes, and the system allows {max} for a socket", max = limit::SOCKET_PATH_BYTES_MAX)]
    TooLong { path: String, length: usize },
}

impl SettingsError {
    /// Returns the action that solves the problem.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoNodeName | Self::NodeName { .. } => {
                "give --node-name (nodeName in the config); in a pod, NODEDOCK_NODE_NAME from the field spec.nodeName"
            }
            Self::KubeletRoot(_) => "give --kubelet-root the value of the kubelet's --root-dir",
            Self::Pod(_) => {
                "in a pod, compose it from the fields metadata.namespace and metadata.name, or leave it out"
            }
            Self::Stray(_) => "add --kubernetes, or leave it out",
            Self::LocalApiInCluster => {
                "leave one out: a Kubernetes node has its claims from the cluster's API server"
            }
            Self::ListensToNothing => "add --local-api, or leave it out",
            Self::QuotaWithoutGroup => "add localApi.group, or leave them out",
            Self::NotLoopback(_) => "give an address such as 127.0.0.1:7443",
            Self::Group { .. } => "make the group, or give its number",
            Self::TooLong { .. } => {
                "mount the kubelet's root directory under a shorter path, and name that with --kubelet-root"
            }
        }
    }
}

/// Puts flags, file and defaults together. None: this is no Kubernetes node. `node_name`: of the flags or the file, not the host's.
pub(super) fn resolve(
    flags: KubernetesFlags,
    section: &KubernetesSection,
    root: &Path,
    node_name: Option<&str>,
) -> Result<Option<KubernetesConfig>, SettingsError> {
    if !flags.enabled.or(section.enabled).unwrap_or(false) {
        return refuse_stray(&flags).map(|()| None);
    }
    let name = node_name.ok_or(SettingsError::NoNodeName)?;
    let node_name = ObjectName::new(name).map_err(|error| SettingsError::NodeName {
        name: name.to_owned(),
        rule: error.to_string(),
    })?;
    let kubelet_root = flags.kubelet_root.or_else(|| section.kubelet_root.clone());
    let kubelet_root = kubelet_root.unwrap_or_else(|| root.join("var/lib/kubelet"));
    if !kubelet_root.is_absolute() {
        return Err(SettingsError::KubeletRoot(kubelet_root));
    }
    check_lengths(&kubelet_root)?;
    let slices = section.slice_settings(&node_name);
    let own_pod = flags
        .pod
        .map(|pod| own_pod(&pod).ok_or(SettingsError::Pod(pod)))
        .transpose()?;
    Ok(Some(KubernetesConfig {
        node_name,
        own_pod,
        kubelet_root,
        kubeconfig: flags.kubeconfig.or_else(|| section.kubeconfig.clone()),
        requests_per_second: section.requests_per_second.unwrap_or(limit::API_PER_SECOND),
        request_burst: section.request_burst.unwrap_or(limit::API_BURST),
        slices,
        extended_resources: section.extended_resources.unwrap_or_default(),
        numa_node_form: match section.numa_node_list {
            Some(true) => NumaNodeForm::List,
            Some(false) | None => NumaNodeForm::Number,
        },
    }))
}

impl KubernetesSection {
    /// Returns what operators add to the devices of this node.
    pub fn slice_settings(&self, node: &ObjectName) -> SliceSettings {
        // Rules are for many nodes, and name their pools without one; a pool of another node is none here.
        let names = PoolNames { node: node.clone() };
        let (mut overhead, mut binding) = (self.overhead.clone(), self.binding_conditions.clone());
        let pools = overhead.iter_mut().map(|rule| &mut rule.pool);
        let pools = pools.chain(binding.iter_mut().map(|rule| &mut rule.pool));
        for pool in pools.flatten() {
            if let Ok(own) = PoolName::new(names.local(pool.as_str())) {
                *pool = own;
            }
        }
        SliceSettings {
            evict_after: self.evict_unhealthy_after_seconds.map(Duration::from_secs),
            overhead,
            binding,
        }
    }

    /// Returns the keys that are read only when the daemon starts.
    pub(super) fn read_at_start(&self) -> Self {
        Self {
            evict_unhealthy_after_seconds: None,
            overhead: Vec::new(),
            binding_conditions: Vec::new(),
            ..self.clone()
        }
    }
}

fn own_pod(text: &str) -> Option<(ObjectName, ObjectName)> {
    let (namespace, name) = text.split_once('/')?;
    ObjectName::new(namespace)
        .ok()
        .zip(ObjectName::new(name).ok())
}

fn refuse_stray(flags: &KubernetesFlags) -> Result<(), SettingsError> {
    match (&flags.kubelet_root, &flags.kubeconfig) {
        (Some(_), _) => Err(SettingsError::Stray("--kubelet-root")),
        (None, Some(_)) => Err(SettingsError::Stray("--kubeconfig")),
        (None, None) => Ok(()),
    }
}

/// The shortest name of a registration socket has a hash of 22 letters instead of the driver's name; the name of the kubelet's own
/// socket for device plugins is fixed.
fn check_lengths(kubelet_root: &Path) -> Result<(), SettingsError> {
    let hashed = "plugins_registry/dra-0000000000000000000000-reg.sock";
    for below in [hashed, "device-plugins/kubelet.sock"] {
        let path = kubelet_root.join(below);
        let length = path.as_os_str().len();
        if length > limit::SOCKET_PATH_BYTES_MAX {
            return Err(SettingsError::TooLong {
                path: path.display().to_string(),
                length,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on() -> KubernetesFlags {
        KubernetesFlags {
            enabled: Some(true),
            ..KubernetesFlags::default()
        }
    }

    fn of(
        flags: KubernetesFlags,
        section: &KubernetesSection,
    ) -> Result<Option<KubernetesConfig>, SettingsError> {
        resolve(flags, section, Path::new("/r"), Some("node-1"))
    }

    #[test]
    fn flags_override_section_and_defaults() {
        let section = KubernetesSection {
            enabled: Some(true),
            kubelet_root: Some("/k".into()),
            kubeconfig: Some("/c".into()),
            requests_per_second: Some(3),
            request_burst: Some(4),
            numa_node_list: Some(true),
            evict_unhealthy_after_seconds: Some(60),
            overhead: Vec::new(),
            binding_conditions: Vec::new(),
            extended_resources: Some(MechanismSetting::Dra),
        };
        let config = of(KubernetesFlags::default(), &section).unwrap().unwrap();
        assert_eq!(
            (config.kubelet_root, config.kubeconfig),
            ("/k".into(), Some("/c".into()))
        );
        assert_eq!((config.requests_per_second, config.request_burst), (3, 4));
        assert_eq!(config.numa_node_form, NumaNodeForm::List);
        assert_eq!(config.extended_resources, MechanismSetting::Dra);
        assert_eq!(config.slices.evict_after, Some(Duration::from_secs(60)));
        let flags = KubernetesFlags {
            kubelet_root: Some("/f".into()),
            kubeconfig: Some("/g".into()),
            ..on()
        };
        let config = of(flags, &section).unwrap().unwrap();
        assert_eq!(
            (config.kubelet_root, config.kubeconfig),
            ("/f".into(), Some("/g".into()))
        );
        let plain = of(on(), &KubernetesSection::default()).unwrap().unwrap();
        assert_eq!(plain.extended_resources, MechanismSetting::Auto);
        assert_eq!(
            (plain.kubelet_root, plain.kubeconfig),
            ("/r/var/lib/kubelet".into(), None)
        );
        let off = KubernetesFlags {
            enabled: Some(false),
            ..KubernetesFlags::default()
        };
        assert_eq!(of(off, &section), Ok(None));
        assert_eq!(
            of(KubernetesFlags::default(), &KubernetesSection::default()),
            Ok(None)
        );
    }

    #[test]
    fn rule_pool_may_omit_node_name() {
        let rules = |pool: &str| {
            let text = format!(
                "enabled: true\noverhead: [{{driver: g.dev, pool: {pool}, resources: {{cpu: {{perPod: \"1\"}}}}}}]\nbindingConditions: [{{driver: g.dev, pool: {pool}}}]\n"
            );
            let section: KubernetesSection = serde_saphyr::from_str(&text).unwrap();
            let slices = of(KubernetesFlags::default(), &section)
                .unwrap()
                .unwrap()
                .slices;
            [
                slices.overhead[0].pool.clone(),
                slices.binding[0].pool.clone(),
            ]
            .map(|pool| pool.unwrap().to_string())
        };
        for (named, own) in [
            ("gpus", "gpus"),
            ("node-1/gpus", "gpus"),
            ("node-2/gpus", "node-2/gpus"),
        ] {
            assert_eq!(rules(named), [own, own]);
        }
    }

    #[test]
    fn extended_resource_mechanism_has_three_values() {
        let read = |value: &str| {
            serde_saphyr::from_str::<KubernetesSection>(&format!("extendedResources: {value}\n"))
        };
        for (value, expected) in [
            ("auto", MechanismSetting::Auto),
            ("dra", MechanismSetting::Dra),
            ("device-plugin", MechanismSetting::DevicePlugin),
        ] {
            assert_eq!(read(value).unwrap().extended_resources, Some(expected));
        }
        let error = read("both").unwrap_err().to_string();
        assert!(
            error.contains("both") && error.contains("device-plugin"),
            "{error}"
        );
    }

    #[test]
    fn missing_or_ineffective_value_is_named() {
        let plain = KubernetesSection::default();
        let resolved = |flags, name| resolve(flags, &plain, Path::new("/r"), name).unwrap_err();
        assert_eq!(resolved(on(), None), SettingsError::NoNodeName);
        let bad = resolved(on(), Some("Node_1"));
        assert!(
            bad.to_string().contains("\"Node_1\"") && bad.hint().contains("--node-name"),
            "{bad}"
        );
        let relative = KubernetesFlags {
            kubelet_root: Some("kubelet".into()),
            ..on()
        };
        assert_eq!(
            resolved(relative, Some("n")),
            SettingsError::KubeletRoot("kubelet".into())
        );
        let stray = KubernetesFlags {
            kubeconfig: Some("/c".into()),
            ..KubernetesFlags::default()
        };
        assert_eq!(
            resolved(stray, Some("n")),
            SettingsError::Stray("--kubeconfig")
        );
        for pod in ["pod", "/pod", "ns/", "ns/pod/x", "Ns/pod"] {
            let flags = KubernetesFlags {
                pod: Some(pod.to_owned()),
                ..on()
            };
            assert_eq!(
                resolved(flags, Some("n")),
                SettingsError::Pod(pod.to_owned())
            );
        }
    }

    #[test]
    fn overlong_socket_directory_is_refused() {
        for (length, fits) in [(1, true), (54, true), (55, false), (107, false)] {
            let root = format!("/{}", "x".repeat(length - 1));
            let flags = KubernetesFlags {
                kubelet_root: Some(root.into()),
                ..on()
            };
            assert_eq!(
                of(flags, &KubernetesSection::default()).is_ok(),
                fits,
                "{length}"
            );
        }
    }
}
