//! The versions of `resource.k8s.io`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIGroup;
use kube::core::{ApiResource, GroupVersionKind};
use std::time::Duration;
use tokio::time::Instant;

use super::{API_PROBE_PERIOD, ApiError, ErrorKind};
use nodedock_base::worded;
use nodedock_model::ObjectName;

/// Interval of reading its served versions: a cluster is upgraded while the daemon runs.
const API_VERSIONS_PERIOD: Duration = Duration::from_secs(600);

worded! {
    /// A version of `resource.k8s.io` that this client speaks. The first that is served is used.
    DraVersion {
        V1 = "v1",
        V1beta2 = "v1beta2",
        V1beta1 = "v1beta1",
    }
}

/// A resource of `resource.k8s.io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraResource {
    Claims,
    Classes,
    Slices,
}

impl DraVersion {
    /// Path of a claim.
    pub(crate) fn claim_path(self, namespace: &ObjectName, name: &ObjectName) -> String {
        let version = self.as_str();
        format!("/apis/resource.k8s.io/{version}/namespaces/{namespace}/resourceclaims/{name}")
    }

    pub fn resource(self, of: DraResource) -> ApiResource {
        let (kind, plural) = match of {
            DraResource::Claims => ("ResourceClaim", "resourceclaims"),
            DraResource::Classes => ("DeviceClass", "deviceclasses"),
            DraResource::Slices => ("ResourceSlice", "resourceslices"),
        };
        ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk("resource.k8s.io", self.as_str(), kind),
            plural,
        )
    }
}

/// Versions with DeviceTaintRules, newest first (Kubernetes 1.37, 1.36, 1.33). A server serves the rules in some of its versions only.
const TAINT_RULE_VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];

/// Returns the resources as which DeviceTaintRules may be served, by the versions that the group reports; newest first.
pub(super) fn taint_rules(group: &APIGroup) -> impl Iterator<Item = ApiResource> {
    TAINT_RULE_VERSIONS
        .iter()
        .copied()
        .filter(|version| {
            group
                .versions
                .iter()
                .any(|served| served.version == **version)
        })
        .map(|version| {
            let kind = GroupVersionKind::gvk("resource.k8s.io", version, "DeviceTaintRule");
            ApiResource::from_gvk_with_plural(&kind, "devicetaintrules")
        })
}

/// The version to use, by what the group says it serves.
pub(super) fn choose(group: &APIGroup) -> Result<DraVersion, ApiError> {
    let served: Vec<&str> = group
        .versions
        .iter()
        .map(|version| version.version.as_str())
        .collect();
    let known = DraVersion::ALL
        .iter()
        .find(|version| served.contains(&version.as_str()));
    known.copied().ok_or_else(|| not_served(&served))
}

pub(super) fn not_served(served: &[&str]) -> ApiError {
    let served = if served.is_empty() {
        "nothing".to_owned()
    } else {
        served.join(", ")
    };
    let words = format!(
        "resource.k8s.io in v1, v1beta2 or v1beta1 (of this group it serves {served}); \
         dynamic resource allocation has to be turned on in the cluster"
    );
    ApiError::new(ErrorKind::NotServed, words)
}

/// Version that is served, as far as it is known.
#[derive(Debug, Default)]
pub(super) struct ServedVersion {
    pub(super) version: Option<DraVersion>,
    asked_at: Option<Instant>,
    failure: Option<ApiError>,
    /// A request used it since it was read.
    is_used: bool,
}

impl ServedVersion {
    /// Returns the answer for a caller that waits since `since`; None: the server has to be queried. One failure answers all callers that
    /// waited for it, so that they do not wait one after the other.
    /// An old one counts, until a request finds that it is not served: no pod waits for what is read again in the background.
    pub(super) fn known(
        &mut self,
        since: Instant,
        now: Instant,
    ) -> Option<Result<DraVersion, ApiError>> {
        let asked_at = self.asked_at?;
        self.is_used = true;
        let age = now.saturating_duration_since(asked_at);
        match (self.version, &self.failure) {
            (Some(version), None) => Some(Ok(version)),
            (Some(version), Some(_)) if age < API_PROBE_PERIOD => Some(Ok(version)),
            (None, Some(failure)) if asked_at > since => Some(Err(failure.clone())),
            _ => None,
        }
    }

    /// Returns whether the version is used and to be read again, while no pod waits.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let age = self.asked_at.map(|at| now.saturating_duration_since(at));
        self.is_used && self.version.is_some() && age.is_some_and(|age| age >= API_VERSIONS_PERIOD)
    }

    /// A version counts until the API server says that it is not served: one that starts forbids for a moment what it allows.
    pub(super) fn learn(
        &mut self,
        asked: Result<DraVersion, ApiError>,
        now: Instant,
    ) -> Result<DraVersion, ApiError> {
        self.asked_at = Some(now);
        self.is_used = false;
        self.failure = asked.as_ref().err().cloned();
        match &asked {
            Ok(version) => self.version = Some(*version),
            Err(error) if error.kind == ErrorKind::NotServed => self.version = None,
            Err(_) => {}
        }
        self.version.map_or(asked, Ok)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::GroupVersionForDiscovery;

    use super::*;

    #[test]
    fn newest_common_version_is_chosen() {
        let chosen = |versions: &[&str]| {
            let versions = versions.iter().map(|version| GroupVersionForDiscovery {
                group_version: String::new(),
                version: (*version).to_owned(),
            });
            choose(&APIGroup {
                versions: versions.collect(),
                ..APIGroup::default()
            })
        };
        assert_eq!(chosen(&["v1beta1", "v1", "v1beta2"]), Ok(DraVersion::V1));
        assert_eq!(chosen(&["v1beta1", "v1beta2"]), Ok(DraVersion::V1beta2));
        assert_eq!(chosen(&["v1beta1", "v1alpha3"]), Ok(DraVersion::V1beta1));
        let none = chosen(&["v1alpha3", "v2"]).unwrap_err();
        assert!(none.kind == ErrorKind::NotServed && none.message.contains("v1alpha3, v2"));
        assert!(chosen(&[]).unwrap_err().message.contains("serves nothing"));
    }

    #[test]
    fn concurrent_callers_share_one_version_failure() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let gone = || Err(ApiError::unreachable("gone"));
        let mut served = ServedVersion::default();
        assert_eq!(served.known(start, start), None);
        assert_eq!(served.learn(gone(), after(10)), gone());
        assert_eq!(served.known(after(9), after(10)), Some(gone()));
        assert_eq!(served.known(after(10), after(10)), None);
        assert_eq!(
            served.learn(Ok(DraVersion::V1), after(20)),
            Ok(DraVersion::V1)
        );
        assert_eq!(
            served.known(after(600), after(600)),
            Some(Ok(DraVersion::V1))
        );
        assert!(!served.is_due(after(619)) && served.is_due(after(620)));
        assert_eq!(
            served.known(after(620), after(620)),
            Some(Ok(DraVersion::V1)),
            "no request waits for it"
        );
        assert_eq!(served.learn(gone(), after(630)), Ok(DraVersion::V1));
        assert!(!served.is_due(after(9999)), "no request used it since");
        assert_eq!(
            served.known(after(640), after(640)),
            Some(Ok(DraVersion::V1))
        );
        assert_eq!(served.known(after(645), after(645)), None);
        let forbidden = Err(ApiError::new(ErrorKind::Forbidden, "not yet"));
        assert_eq!(served.learn(forbidden, after(646)), Ok(DraVersion::V1));
        let nothing = not_served(&[]);
        assert_eq!(served.learn(Err(nothing.clone()), after(650)), Err(nothing));
        assert_eq!(served.version, None);
    }
}
