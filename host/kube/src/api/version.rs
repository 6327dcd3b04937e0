//! The versions of `resource.k8s.io`, and paths of the API.

use serde_json::Value;
use tokio::time::Instant;

use super::error::ApiError;
use nodedock_base::worded;
use nodedock_model::{ObjectName, limit};

worded! {
    /// A version of `resource.k8s.io` that we speak. The first that is served is taken.
    Version {
        V1 = "v1",
        V1beta2 = "v1beta2",
        V1beta1 = "v1beta1",
    }
}

/// Where the group says what it serves.
pub(super) const GROUP_PATH: &str = "/apis/resource.k8s.io";

impl Version {
    /// `resource.k8s.io/v1`, as objects say it.
    pub fn api_version(self) -> String {
        format!("resource.k8s.io/{}", self.as_str())
    }

    pub fn slices(self) -> String {
        format!("{GROUP_PATH}/{}/resourceslices", self.as_str())
    }

    pub fn slice(self, name: &str) -> String {
        format!("{}/{name}", self.slices())
    }

    pub fn claims(self, namespace: &ObjectName) -> String {
        format!("{GROUP_PATH}/{}/namespaces/{namespace}/resourceclaims", self.as_str())
    }

    pub fn claim(self, namespace: &ObjectName, name: &ObjectName) -> String {
        format!("{}/{name}", self.claims(namespace))
    }

    pub fn claim_status(self, namespace: &ObjectName, name: &ObjectName) -> String {
        format!("{}/status", self.claim(namespace, name))
    }
}

/// The version to speak, by the group's own answer (`APIGroup`). Otherwise what it serves.
pub(super) fn choose(group: &Value) -> Result<Version, Vec<String>> {
    let versions = group.get("versions").and_then(Value::as_array).into_iter().flatten();
    let served: Vec<&str> = versions.filter_map(|version| version.get("version")?.as_str()).collect();
    let known = Version::ALL.iter().find(|version| served.contains(&version.as_str()));
    known.copied().ok_or_else(|| served.iter().map(|version| (*version).to_owned()).collect())
}

/// Which version is served, as far as it was asked.
#[derive(Debug, Default)]
pub(super) struct Served {
    pub(super) version: Option<Version>,
    asked_at: Option<Instant>,
    failure: Option<ApiError>,
}

impl Served {
    /// What is known to somebody who wants to know since then; None: it has to be asked. One failure is the answer to all who waited
    /// for it, so that they do not wait one after the other.
    pub(super) fn known(&self, since: Instant, now: Instant) -> Option<Result<Version, ApiError>> {
        let asked_at = self.asked_at?;
        match (self.version, &self.failure) {
            (Some(version), failure) => {
                let period = match failure {
                    None => limit::API_VERSIONS_PERIOD,
                    Some(_) => limit::API_PROBE_PERIOD,
                };
                (now.saturating_duration_since(asked_at) < period).then_some(Ok(version))
            }
            (None, Some(failure)) if asked_at > since => Some(Err(failure.clone())),
            (None, _) => None,
        }
    }

    /// What was served goes on until it is said to be gone.
    pub(super) fn learn(
        &mut self,
        asked: Result<Version, ApiError>,
        now: Instant,
    ) -> Result<Version, ApiError> {
        self.asked_at = Some(now);
        self.failure = asked.as_ref().err().cloned();
        // A refusal says nothing of what is served: an API server that starts forbids for a moment what it allows.
        if matches!(asked, Ok(_) | Err(ApiError::NotServed(_))) {
            self.version = asked.as_ref().ok().copied();
        }
        self.version.ok_or(asked).or_else(|asked| asked)
    }
}

/// A path with parameters.
pub(super) fn with_query(path: &str, parameters: &[(&str, &str)]) -> String {
    let mut whole = path.to_owned();
    for (index, (key, value)) in parameters.iter().enumerate() {
        whole.push(if index == 0 { '?' } else { '&' });
        push_encoded(&mut whole, key);
        whole.push('=');
        push_encoded(&mut whole, value);
    }
    whole
}

fn push_encoded(text: &mut String, part: &str) {
    for byte in part.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                text.push(char::from(byte))
            }
            other => text.push_str(&format!("%{other:02X}")),
        }
    }
}

/// The resource of a path, of a few that are counted by name.
pub(super) fn resource_of(path: &str) -> &'static str {
    const KNOWN: [&str; 5] = ["resourceclaims", "resourceslices", "pods", "nodes", "events"];
    let path = path.split('?').next().unwrap_or_default();
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    // `api/VERSION` or `apis/GROUP/VERSION`.
    let head = if parts.next() == Some("apis") { 2 } else { 1 };
    let mut parts = parts.skip(head);
    let resource = match parts.next() {
        Some("namespaces") => parts.nth(1),
        resource => resource,
    };
    KNOWN.into_iter().find(|known| resource == Some(*known)).unwrap_or("other")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group(versions: &[&str]) -> Value {
        let versions: Vec<_> = versions.iter().map(|version| json!({ "version": version })).collect();
        json!({ "kind": "APIGroup", "versions": versions })
    }

    #[test]
    fn the_newest_version_that_both_speak_is_taken_whatever_the_order() {
        assert_eq!(choose(&group(&["v1beta1", "v1", "v1beta2"])), Ok(Version::V1));
        assert_eq!(choose(&group(&["v1beta1", "v1beta2"])), Ok(Version::V1beta2));
        assert_eq!(choose(&group(&["v1beta1", "v1alpha3"])), Ok(Version::V1beta1));
        assert_eq!(choose(&group(&["v1alpha3", "v2"])), Err(vec!["v1alpha3".to_owned(), "v2".to_owned()]));
        assert_eq!(choose(&json!({})), Err(vec![]));
        assert_eq!(choose(&json!({ "versions": "v1" })), Err(vec![]));
    }

    #[test]
    fn one_failure_answers_all_who_waited_for_it_and_what_was_served_goes_on() {
        let start = Instant::now();
        let after = |seconds| start + std::time::Duration::from_secs(seconds);
        let gone = || Err(ApiError::unavailable("gone"));
        let mut served = Served::default();
        assert_eq!(served.known(start, start), None);
        assert_eq!(served.learn(gone(), after(10)), gone());
        assert_eq!(served.known(after(9), after(10)), Some(gone()));
        assert_eq!(served.known(after(10), after(10)), None);
        assert_eq!(served.learn(Ok(Version::V1), after(20)), Ok(Version::V1));
        assert_eq!(served.known(after(600), after(600)), Some(Ok(Version::V1)));
        assert_eq!(served.known(after(620), after(620)), None);
        assert_eq!(served.learn(gone(), after(630)), Ok(Version::V1));
        assert_eq!(served.known(after(640), after(640)), Some(Ok(Version::V1)));
        assert_eq!(served.known(after(645), after(645)), None);
        let forbidden = Err(ApiError::Forbidden("not yet".to_owned()));
        assert_eq!(served.learn(forbidden, after(646)), Ok(Version::V1));
        let nothing = ApiError::NotServed("resource.k8s.io".to_owned());
        assert_eq!(served.learn(Err(nothing.clone()), after(650)), Err(nothing));
        assert_eq!(served.version, None);
    }

    #[test]
    fn paths_are_those_of_an_api_server() {
        let (namespace, name) = (ObjectName::new("default").unwrap(), ObjectName::new("one-gpu").unwrap());
        assert_eq!(
            Version::V1.claim_status(&namespace, &name),
            "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/one-gpu/status"
        );
        assert_eq!(Version::V1beta1.slice("a"), "/apis/resource.k8s.io/v1beta1/resourceslices/a");
        assert_eq!(
            with_query(
                "/a",
                &[("fieldSelector", "spec.nodeName=node-1,spec.driver=gpu.example.com"), ("x", "é ")]
            ),
            "/a?fieldSelector=spec.nodeName%3Dnode-1%2Cspec.driver%3Dgpu.example.com&x=%C3%A9%20"
        );
        assert_eq!(resource_of("/api/v1/nodes/node-1?watch=pods"), "nodes");
        assert_eq!(resource_of("/api/v1/namespaces/pods/events"), "events");
        assert_eq!(resource_of(&Version::V1.claim_status(&namespace, &name)), "resourceclaims");
        for other in [GROUP_PATH, "/api/v1/namespaces/pods", "", "/"] {
            assert_eq!(resource_of(other), "other");
        }
    }
}
