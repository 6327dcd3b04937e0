//! Claims: allocated devices, their parameters, and prepared claims.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Counter, Problem, json, parse_json};

/// Reference to a ResourceClaim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimRef {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim, which identifies it everywhere.
    pub uid: String,
}

/// A device that the scheduler allocated to a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// Request of the claim; `request/subrequest` for a prioritised list.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Share of a device that allows several allocations.
    pub share_id: Option<String>,
    /// Amounts that the claim consumes of the capacities of a shared device.
    pub consumed: Vec<Counter>,
    /// Access for management: the device must not change for the claims that use it.
    pub admin_access: bool,
}

impl AllocatedDevice {
    /// Creates an allocation of a whole device for a request.
    pub fn new(
        request: impl Into<String>,
        pool: impl Into<String>,
        device: impl Into<String>,
    ) -> Self {
        AllocatedDevice {
            request: request.into(),
            pool: pool.into(),
            device: device.into(),
            ..AllocatedDevice::default()
        }
    }

    /// Returns the request without the subrequest.
    pub fn base_request(&self) -> &str {
        base_request(&self.request)
    }

    /// Returns the name of an environment variable for the device.
    ///
    /// ```
    /// use nodedock_sdk::AllocatedDevice;
    ///
    /// let allocated = AllocatedDevice::new("r", "usb.cameras", "pci-0000-04-00-0");
    /// assert_eq!(allocated.variable("CAMERA"), "CAMERA_USB_CAMERAS_PCI_0000_04_00_0");
    /// ```
    pub fn variable(&self, prefix: &str) -> String {
        let name = format!("{prefix}_{}_{}", self.pool, self.device);
        name.replace(['-', '.'], "_").to_ascii_uppercase()
    }

    /// Returns the consumed amount of a capacity, in Kubernetes' notation.
    pub fn consumed(&self, capacity: &str) -> Option<&str> {
        self.consumed
            .iter()
            .find(|counter| counter.name == capacity)
            .map(|counter| counter.value.as_str())
    }
}

fn base_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

/// Source of an [`OpaqueParameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ParametersSource {
    /// The DeviceClass, written by an administrator.
    DeviceClass,
    /// The claim, written by a user. Takes precedence over the class.
    Claim,
}

/// Parameters for this driver from a DeviceClass or a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpaqueParameters {
    /// Source of the parameters.
    pub source: ParametersSource,
    /// Requests to which the parameters apply; empty means all.
    pub requests: Vec<String>,
    /// JSON.
    pub parameters: String,
}

impl OpaqueParameters {
    /// Returns whether the parameters apply to this request: they name no request, the request, or the request without its subrequest.
    pub fn applies_to(&self, request: &str) -> bool {
        let base = base_request(request);
        self.requests.is_empty()
            || self
                .requests
                .iter()
                .any(|named| named == request || named == base)
    }
}

/// A consumer that a claim is reserved for: a pod, if `resource` is `pods`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consumer {
    /// API group; empty for pods.
    pub api_group: String,
    /// Plural, in lower case.
    pub resource: String,
    /// Namespace of the consumer.
    pub namespace: String,
    /// Name of the consumer.
    pub name: String,
    /// UID of the consumer.
    pub uid: String,
}

impl Consumer {
    /// Creates a pod.
    pub fn pod(
        namespace: impl Into<String>,
        name: impl Into<String>,
        uid: impl Into<String>,
    ) -> Self {
        Consumer {
            api_group: String::new(),
            resource: "pods".into(),
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        }
    }
}

/// A claim with the devices that were allocated to it from this driver.
///
/// ```
/// use nodedock_sdk::{Claim, ParametersSource};
///
/// #[derive(Debug, PartialEq, serde::Deserialize)]
/// struct Brightness {
///     percent: u8,
/// }
///
/// let claim = Claim::new("default", "lamp", "uid-1")
///     .device("front", "leds", "led-0")
///     .with_parameters(ParametersSource::DeviceClass, [], r#"{"percent": 20}"#)
///     .with_parameters(ParametersSource::Claim, ["front"], r#"{"percent": 80}"#);
/// assert_eq!(claim.parse_parameters::<Brightness>("front")?, Some(Brightness { percent: 80 }));
/// assert_eq!(claim.parse_parameters::<Brightness>("back")?, Some(Brightness { percent: 20 }));
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Identity of the claim.
    pub id: ClaimRef,
    /// Devices of this driver that are allocated to the claim.
    pub devices: Vec<AllocatedDevice>,
    /// Parameters for this driver only. Later entries take precedence; those of the claim come after those of the class.
    pub parameters: Vec<OpaqueParameters>,
    /// Consumers when the call began. They change while the claim is prepared: use them for logs and statuses only.
    pub reserved_for: Vec<Consumer>,
    /// Annotations that the host adds, such as facts about the pod.
    pub annotations: Vec<(String, String)>,
    /// Progress that the driver saved last with [`Progress::save`](crate::Progress::save) in a prepare of this claim that did not succeed;
    /// empty if there is none.
    pub progress: Vec<u8>,
}

impl Claim {
    /// Creates a claim without devices, for tests.
    pub fn new(
        namespace: impl Into<String>,
        name: impl Into<String>,
        uid: impl Into<String>,
    ) -> Self {
        let id = ClaimRef {
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        };
        Claim {
            id,
            ..Claim::default()
        }
    }

    /// Adds a whole device.
    #[must_use]
    pub fn device(
        self,
        request: impl Into<String>,
        pool: impl Into<String>,
        device: impl Into<String>,
    ) -> Self {
        self.with_device(AllocatedDevice::new(request, pool, device))
    }

    /// Adds a device.
    #[must_use]
    pub fn with_device(mut self, device: AllocatedDevice) -> Self {
        self.devices.push(device);
        self
    }

    /// Adds opaque parameters (JSON) for these requests; no requests means all.
    #[must_use]
    pub fn with_parameters<const N: usize>(
        mut self,
        source: ParametersSource,
        requests: [&str; N],
        parameters: impl Into<String>,
    ) -> Self {
        let requests = requests.into_iter().map(str::to_owned).collect();
        self.parameters.push(OpaqueParameters {
            source,
            requests,
            parameters: parameters.into(),
        });
        self
    }

    /// Returns the parameters for a request in ascending precedence: those of the class, then those of the claim, each in their original
    /// order.
    pub fn parameters_for(&self, request: &str) -> Vec<&OpaqueParameters> {
        let mut entries: Vec<_> = self
            .parameters
            .iter()
            .filter(|entry| entry.applies_to(request))
            .collect();
        entries.sort_by_key(|entry| entry.source);
        entries
    }

    /// Returns the parameters for a request: the entry with the highest precedence, as a whole. `None` without any entry.
    ///
    /// # Errors
    ///
    /// `invalid`, code `bad-parameters`, if these parameters do not parse as `T`.
    pub fn parse_parameters<T: DeserializeOwned>(
        &self,
        request: &str,
    ) -> Result<Option<T>, Problem> {
        self.parameters_for(request)
            .last()
            .map(|entry| self.parse(request, &entry.parameters))
            .transpose()
    }

    /// Returns the parameters for a request, merged field by field (RFC 7396: null removes), so that a claim can override a single
    /// field of its class. `None` without any entry.
    ///
    /// ```
    /// use nodedock_sdk::{Claim, ParametersSource};
    ///
    /// #[derive(Debug, PartialEq, serde::Deserialize)]
    /// struct Led {
    ///     percent: u8,
    ///     colour: String,
    /// }
    ///
    /// let claim = Claim::new("default", "lamp", "uid-1")
    ///     .with_parameters(ParametersSource::DeviceClass, [], r#"{"percent": 20, "colour": "red"}"#)
    ///     .with_parameters(ParametersSource::Claim, [], r#"{"percent": 80}"#);
    /// assert_eq!(claim.merge_parameters::<Led>("led")?, Some(Led { percent: 80, colour: "red".into() }));
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `invalid`, code `bad-parameters`, if any of them is not JSON or the result does not parse as `T`.
    pub fn merge_parameters<T: DeserializeOwned>(
        &self,
        request: &str,
    ) -> Result<Option<T>, Problem> {
        let entries = self.parameters_for(request);
        if entries.is_empty() {
            return Ok(None);
        }
        let mut merged = Value::Null;
        for entry in entries {
            json::merge(&mut merged, self.parse(request, &entry.parameters)?);
        }
        self.parse(request, &merged.to_string()).map(Some)
    }

    /// Parses the progress as the type that the driver passed to [`Progress::save_json`](crate::Progress::save_json); `None` if it is
    /// empty.
    ///
    /// # Errors
    ///
    /// `internal`, code `bad-progress`, if it does not parse. Keep types of progress compatible.
    pub fn progress<T: DeserializeOwned>(&self) -> Result<Option<T>, Problem> {
        parse_bytes("progress", &self.id.uid, &self.progress)
    }

    fn parse<T: DeserializeOwned>(&self, request: &str, text: &str) -> Result<T, Problem> {
        parse_json(
            "bad-parameters",
            &format!("parameters for request {request:?}"),
            text,
        )
    }
}

/// A claim that this driver has prepared on this node, or may have begun to prepare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimRecord {
    /// The claim as it was prepared.
    pub claim: Claim,
    /// True if a prepare succeeded. If not, one runs now, waits for its turn, failed, or was interrupted.
    pub prepared: bool,
    /// The [`Prepared::memo`](crate::Prepared::memo) of the last prepare that succeeded; empty if none did.
    pub memo: Vec<u8>,
    /// Version of the driver that prepared it, or else that was called last.
    pub driver_version: String,
    /// Boot of the node in which the driver was called. If it differs from the context's, no kernel state (a virtual function, a
    /// partition, a module parameter) is as the driver left it.
    pub boot_id: String,
}

impl ClaimRecord {
    /// Parses the memo as the type that the driver passed to [`Prepared::with_memo`](crate::Prepared::with_memo); `None` if it is empty.
    ///
    /// # Errors
    ///
    /// `internal`, code `bad-memo`, if it does not parse, for example because an earlier version of the driver wrote another type. Keep
    /// memo types compatible.
    pub fn memo<T: DeserializeOwned>(&self) -> Result<Option<T>, Problem> {
        let memo = parse_bytes("memo", &self.claim.id.uid, &self.memo);
        memo.map_err(|problem| problem.with_detail("driver-version", self.driver_version.clone()))
    }
}

/// Parses what a driver saved; `None` if that is nothing.
fn parse_bytes<T: DeserializeOwned>(
    what: &str,
    uid: &str,
    bytes: &[u8],
) -> Result<Option<T>, Problem> {
    if bytes.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(bytes).map(Some).map_err(|error| {
        Problem::internal(
            format!("bad-{what}"),
            format!("{what} of claim {uid}: {error}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemKind;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Parameters {
        #[serde(default)]
        mode: String,
        #[serde(default)]
        depth: u32,
    }

    fn parameters(mode: &str, depth: u32) -> Option<Parameters> {
        Some(Parameters {
            mode: mode.into(),
            depth,
        })
    }

    fn claim() -> Claim {
        Claim::new("ns", "name", "uid")
    }

    #[test]
    fn claim_parameters_override_class_parameters() {
        let claim = claim()
            .with_parameters(ParametersSource::Claim, [], r#"{"mode": "claim"}"#)
            .with_parameters(ParametersSource::DeviceClass, [], r#"{"mode": "class"}"#);
        assert_eq!(
            claim.parse_parameters("any").unwrap(),
            parameters("claim", 0)
        );
    }

    #[test]
    fn the_later_of_one_source_wins() {
        let claim = claim()
            .with_parameters(ParametersSource::Claim, [], r#"{"mode": "one"}"#)
            .with_parameters(ParametersSource::Claim, [], r#"{"mode": "two"}"#);
        assert_eq!(claim.parse_parameters("any").unwrap(), parameters("two", 0));
    }

    #[test]
    fn request_config_covers_only_its_subrequests() {
        let claim = claim().with_parameters(ParametersSource::Claim, ["gpu"], r#"{"mode": "x"}"#);
        assert_eq!(claim.parse_parameters("gpu").unwrap(), parameters("x", 0));
        assert_eq!(
            claim.parse_parameters("gpu/small").unwrap(),
            parameters("x", 0)
        );
        assert_eq!(claim.parse_parameters::<Parameters>("gpu2").unwrap(), None);
    }

    #[test]
    fn subrequest_config_does_not_cover_siblings() {
        let claim =
            claim().with_parameters(ParametersSource::Claim, ["gpu/small"], r#"{"mode": "x"}"#);
        assert_eq!(
            claim.parse_parameters("gpu/small").unwrap(),
            parameters("x", 0)
        );
        assert_eq!(
            claim.parse_parameters::<Parameters>("gpu/large").unwrap(),
            None
        );
        assert_eq!(claim.parse_parameters::<Parameters>("gpu").unwrap(), None);
    }

    #[test]
    fn merge_keeps_unset_class_fields() {
        let claim = claim()
            .with_parameters(
                ParametersSource::DeviceClass,
                [],
                r#"{"mode": "class", "depth": 4}"#,
            )
            .with_parameters(ParametersSource::Claim, [], r#"{"mode": "claim"}"#);
        assert_eq!(
            claim.merge_parameters("any").unwrap(),
            parameters("claim", 4)
        );
        assert_eq!(
            claim.parse_parameters("any").unwrap(),
            parameters("claim", 0)
        );
        assert_eq!(
            super::Claim::default()
                .merge_parameters::<Parameters>("any")
                .unwrap(),
            None
        );
    }

    #[test]
    fn bad_parameters_name_request_and_field() {
        let claim = claim().with_parameters(ParametersSource::Claim, [], r#"{"moed": 1}"#);
        for problem in [
            claim.parse_parameters::<Parameters>("gpu").unwrap_err(),
            claim.merge_parameters::<Parameters>("gpu").unwrap_err(),
        ] {
            assert_eq!(
                (problem.kind, problem.code.as_str()),
                (ProblemKind::Invalid, "bad-parameters")
            );
            assert!(
                problem.message.contains("\"gpu\"") && problem.message.contains("moed"),
                "{problem}"
            );
        }
    }

    #[test]
    fn memo_parses_or_is_a_problem() {
        let mut live = ClaimRecord::default();
        assert_eq!(live.memo::<Parameters>(), Ok(None));
        live.memo = br#"{"mode": "x", "depth": 1}"#.to_vec();
        assert_eq!(live.memo::<Parameters>().unwrap(), parameters("x", 1));
        live.memo = b"\xff".to_vec();
        assert_eq!(live.memo::<Parameters>().unwrap_err().code, "bad-memo");
    }

    #[test]
    fn consumed_amount_is_found_by_capacity() {
        let mut device = AllocatedDevice::new("gpu/small", "p", "d");
        device.consumed.push(Counter {
            name: "memory".into(),
            value: "4Gi".into(),
        });
        assert_eq!(
            (device.consumed("memory"), device.consumed("cores")),
            (Some("4Gi"), None)
        );
        assert_eq!(device.base_request(), "gpu");
    }

    #[test]
    fn invalid_progress_names_the_claim() {
        let with = |progress: &[u8]| Claim {
            progress: progress.to_vec(),
            ..Claim::new("n", "c", "u")
        };
        assert_eq!(with(b"").progress::<Vec<u32>>(), Ok(None));
        assert_eq!(with(b"[1]").progress(), Ok(Some(vec![1])));
        let problem = with(b"{}").progress::<Vec<u32>>().unwrap_err();
        assert_eq!(problem.code, "bad-progress");
        assert!(
            problem.message.starts_with("progress of claim u: "),
            "{problem}"
        );
    }
}
