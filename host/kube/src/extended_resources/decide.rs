//! Decision on the mechanism by which this node offers extended resources: the operator's setting, or the versions of API server and
//! kubelet. Pure.
//!
//! Feature gates of other programs are not visible to a node. Both versions are needed: the API server has to keep the field of a
//! DeviceClass, and the kubelet has to prepare the claim that the scheduler makes. A kubelet is never newer than an API server or the
//! scheduler of its cluster, so a kubelet that is new enough shows that they are, also while a control plane is upgraded.

use std::fmt;

use serde::Deserialize;

use nodedock_model::Mechanism;

/// The first version of Kubernetes in which extended resources through DRA are generally available (KEP-5004).
const DRA_SINCE: Version = Version {
    major: 1,
    minor: 37,
};

/// The operator's setting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MechanismSetting {
    /// Decision by the versions of API server and kubelet.
    #[default]
    Auto,
    Dra,
    DevicePlugin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl Version {
    /// Reads the version that a kubelet reports, such as `v1.37.2` or `v1.37.0+k3s1`.
    pub fn of_kubelet(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix('v').unwrap_or(text).split('.');
        let (major, minor) = (parts.next()?, parts.next()?);
        let minor: String = minor.chars().take_while(char::is_ascii_digit).collect();
        Some(Self {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Facts read from the cluster; `None`: not readable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Cluster {
    pub(super) server: Option<Version>,
    /// True if the API server serves `resource.k8s.io/v1`.
    pub(super) serves_v1: Option<bool>,
    /// Version that the kubelet reports in the Node object.
    pub(super) kubelet: Option<String>,
}

/// The mechanism, and why it is this one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decision {
    pub mechanism: Mechanism,
    pub reason: String,
}

/// Decides for the node. `None`: what was read does not suffice, and the last decision stays.
pub(super) fn decide(setting: MechanismSetting, cluster: &Cluster) -> Option<Decision> {
    let configured = |mechanism| {
        let reason = format!("kubernetes.extendedResources of the config is {mechanism}");
        Some(Decision { mechanism, reason })
    };
    match setting {
        MechanismSetting::Dra => configured(Mechanism::Dra),
        MechanismSetting::DevicePlugin => configured(Mechanism::DevicePlugin),
        MechanismSetting::Auto => by_versions(cluster),
    }
}

fn by_versions(cluster: &Cluster) -> Option<Decision> {
    let old = |what: String| format!("{what}; extended resources through DRA need {DRA_SINCE}");
    let plugin = Mechanism::DevicePlugin;
    let server = cluster.server?;
    let (mechanism, reason) = if server < DRA_SINCE {
        (plugin, old(format!("the API server has version {server}")))
    } else if !cluster.serves_v1? {
        let reason = "the API server does not serve resource.k8s.io/v1";
        (plugin, reason.to_owned())
    } else {
        let kubelet = cluster.kubelet.as_deref()?;
        match Version::of_kubelet(kubelet) {
            Some(version) if version >= DRA_SINCE => {
                let reason =
                    format!("the API server has version {server}, and the kubelet {version}");
                (Mechanism::Dra, reason)
            }
            Some(version) => (plugin, old(format!("the kubelet has version {version}"))),
            None => {
                let what = format!("the kubelet reports no version that is known ({kubelet:?})");
                (plugin, old(what))
            }
        }
    };
    Some(Decision { mechanism, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(minor: u32) -> Option<Version> {
        Some(Version { major: 1, minor })
    }

    fn cluster(server: u32, kubelet: &str) -> Cluster {
        Cluster {
            server: version(server),
            serves_v1: Some(true),
            kubelet: Some(kubelet.to_owned()),
        }
    }

    fn auto(cluster: &Cluster) -> Option<Mechanism> {
        decide(MechanismSetting::Auto, cluster).map(|decision| decision.mechanism)
    }

    #[test]
    fn dra_needs_both_versions_and_api() {
        let (dra, plugin) = (Some(Mechanism::Dra), Some(Mechanism::DevicePlugin));
        for (server, kubelet, expected) in [
            (37, "v1.37.0", dra),
            (38, "v1.37.4+k3s1", dra),
            (37, "1.38.0-gke.100", dra),
            (37, "v1.36.9", plugin),
            (36, "v1.36.2", plugin),
            (37, "v1.x", plugin),
            (37, "", plugin),
        ] {
            assert_eq!(
                auto(&cluster(server, kubelet)),
                expected,
                "{server} and {kubelet:?}"
            );
        }
        let without = Cluster {
            serves_v1: Some(false),
            ..cluster(37, "v1.37.0")
        };
        let decision = decide(MechanismSetting::Auto, &without).unwrap();
        assert!(
            decision.mechanism == Mechanism::DevicePlugin
                && decision.reason.contains("resource.k8s.io/v1")
        );
        let old = decide(MechanismSetting::Auto, &cluster(37, "v1.36.9")).unwrap();
        assert!(old.reason.contains("the kubelet has version 1.36") && old.reason.contains("1.37"));
    }

    #[test]
    fn what_cannot_be_read_decides_nothing() {
        let known = cluster(37, "v1.37.0");
        for unread in [
            Cluster {
                server: None,
                ..known.clone()
            },
            Cluster {
                serves_v1: None,
                ..known.clone()
            },
            Cluster {
                kubelet: None,
                ..known.clone()
            },
        ] {
            assert_eq!(auto(&unread), None, "{unread:?}");
        }
        let old = Cluster {
            server: version(36),
            ..Cluster::default()
        };
        assert_eq!(
            auto(&old),
            Some(Mechanism::DevicePlugin),
            "whatever the kubelet is"
        );
    }

    #[test]
    fn the_operators_setting_needs_no_cluster() {
        let decided = |setting| decide(setting, &Cluster::default()).unwrap();
        assert_eq!(decided(MechanismSetting::Dra).mechanism, Mechanism::Dra);
        let plugin = decided(MechanismSetting::DevicePlugin);
        assert_eq!(plugin.mechanism, Mechanism::DevicePlugin);
        assert!(plugin.reason.contains("kubernetes.extendedResources"));
    }
}
