//! Results of a prepare.

use serde::Serialize;

use crate::{AllocatedDevice, Attribute, AttributeValue, Claim, ContainerEdits, Problem};

/// Status of a condition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConditionStatus {
    /// `True`.
    True,
    /// `False`.
    False,
    /// `Unknown`.
    #[default]
    Unknown,
}

/// A condition of a device, as in Kubernetes' API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Type of the condition, once in a status: a label key such as `Ready` or `example.com/attached`.
    pub kind: String,
    /// Status of the condition.
    pub status: ConditionStatus,
    /// Reason: one word in CamelCase.
    pub reason: String,
    /// Human-readable message.
    pub message: String,
}

/// Network data of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkData {
    /// Name in the container.
    pub interface_name: String,
    /// Addresses in CIDR notation.
    pub ips: Vec<String>,
    /// Hardware address.
    pub hardware_address: String,
}

/// Status of the device, which the host publishes in the claim's `status.devices`.
///
/// ```
/// use nodedock_sdk::testing::bounds;
/// use nodedock_sdk::*;
///
/// let ready = Condition {
///     kind: "Ready".into(),
///     status: ConditionStatus::True,
///     reason: "LinkUp".into(),
///     message: "the link has 100 Gbit/s".into(),
/// };
/// let network = NetworkData {
///     interface_name: "net0".into(),
///     ips: vec!["192.0.2.10/24".into()],
///     hardware_address: "02:00:00:00:00:01".into(),
/// };
/// let status = DeviceStatus { conditions: vec![ready], network: Some(network), ..DeviceStatus::new() };
///
/// let allocated = AllocatedDevice::new("nic", "nics", "eth1");
/// let edits = ContainerEdits::new().net_device("eth1", "net0");
/// let prepared = Prepared::new().device(PreparedDevice::new(&allocated, edits).status(status));
/// assert!(bounds::prepared(&prepared).is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceStatus {
    /// Conditions of the device.
    pub conditions: Vec<Condition>,
    /// JSON object of at most 10 KiB.
    pub data: Option<String>,
    /// Network data.
    pub network: Option<NetworkData>,
    /// Attributes for the file in which a container reads its devices, where they take precedence over those of the inventory: together at
    /// most 32. The claim's `status.devices` does not have them.
    pub attributes: Vec<Attribute>,
}

impl DeviceStatus {
    /// Creates a status without content.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an attribute for the file in which a container reads its devices.
    ///
    /// ```
    /// use nodedock_sdk::DeviceStatus;
    ///
    /// let status = DeviceStatus::new().attribute("partition", "1g.10gb");
    /// assert_eq!(status.attributes[0].name, "partition");
    /// ```
    #[must_use]
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<AttributeValue>) -> Self {
        self.attributes.push(Attribute {
            name: name.into(),
            value: value.into(),
        });
        self
    }
}

/// A prepared device and its container edits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreparedDevice {
    /// Requests that this device satisfies: base names, without subrequests.
    pub requests: Vec<String>,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Share ID of the allocation.
    pub share_id: Option<String>,
    /// ContainerEdits for containers that use the device.
    pub edits: ContainerEdits,
    /// Status of the device, which the host publishes in the claim's `status.devices`.
    pub status: Option<DeviceStatus>,
}

impl PreparedDevice {
    /// Creates the result for an allocated device.
    pub fn new(allocated: &AllocatedDevice, edits: ContainerEdits) -> Self {
        PreparedDevice {
            requests: vec![allocated.base_request().to_owned()],
            pool: allocated.pool.clone(),
            device: allocated.device.clone(),
            share_id: allocated.share_id.clone(),
            edits,
            status: None,
        }
    }

    /// Sets the status for the claim's `status.devices`.
    #[must_use]
    pub fn status(mut self, status: DeviceStatus) -> Self {
        self.status = Some(status);
        self
    }
}

/// The result of preparing a claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prepared {
    /// One entry for every device of the claim.
    pub devices: Vec<PreparedDevice>,
    /// ContainerEdits for every container that uses any of the devices.
    pub edits: ContainerEdits,
    /// Annotations for the agent that starts the container: at most 16. The host passes them on unchanged.
    pub annotations: Vec<(String, String)>,
    /// Memo of at most 64 KiB. The host stores it with the claim and returns it at `unprepare` and from
    /// [`PreparedClaims`](crate::PreparedClaims).
    pub memo: Vec<u8>,
}

impl Prepared {
    /// Creates a result without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the result for a claim by calling `edits` for each device.
    ///
    /// # Errors
    ///
    /// The first problem that `edits` returns.
    ///
    /// ```
    /// use nodedock_sdk::{Claim, ContainerEdits, Prepared};
    ///
    /// let claim = Claim::new("default", "a", "uid").device("r", "misc", "fuse");
    /// let prepared = Prepared::each(&claim, |device| {
    ///     Ok(ContainerEdits::new().device_node(format!("/dev/{}", device.device)))
    /// })?;
    /// assert_eq!(prepared.devices[0].edits.device_nodes[0].path, "/dev/fuse");
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    pub fn each(
        claim: &Claim,
        mut edits: impl FnMut(&AllocatedDevice) -> Result<ContainerEdits, Problem>,
    ) -> Result<Self, Problem> {
        let mut prepared = Prepared::new();
        for device in &claim.devices {
            prepared = prepared.device(PreparedDevice::new(device, edits(device)?));
        }
        Ok(prepared)
    }

    /// Adds a device.
    #[must_use]
    pub fn device(mut self, device: PreparedDevice) -> Self {
        self.devices.push(device);
        self
    }

    /// Sets the edits for every container that uses any of the devices.
    #[must_use]
    pub fn edits(mut self, edits: ContainerEdits) -> Self {
        self.edits = edits;
        self
    }

    /// Adds an annotation for the agent that starts the container.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }

    /// Sets the memo to this value as JSON, at most 64 KiB. The host stores it until the claim is unprepared.
    ///
    /// # Errors
    ///
    /// `internal`, code `bad-memo`, if the value cannot be serialized as JSON.
    pub fn with_memo(mut self, memo: &impl Serialize) -> Result<Self, Problem> {
        self.memo = serde_json::to_vec(memo)
            .map_err(|error| Problem::internal("bad-memo", format!("memo: {error}")))?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ClaimRecord;

    #[test]
    fn prepared_device_keeps_request_and_share() {
        let mut allocated = AllocatedDevice::new("gpu/small", "p", "d");
        allocated.share_id = Some("share".into());
        let device = PreparedDevice::new(&allocated, ContainerEdits::new());
        assert_eq!(device.requests, ["gpu"]);
        assert_eq!(device.share_id.as_deref(), Some("share"));
    }

    #[test]
    fn first_failing_device_fails_the_claim() {
        let claim = Claim::new("n", "c", "u")
            .device("r", "p", "a")
            .device("r", "p", "b");
        let result = Prepared::each(&claim, |device| match device.device.as_str() {
            "a" => Ok(ContainerEdits::new()),
            name => Err(Problem::not_found("gone", name)),
        });
        assert_eq!(result, Err(Problem::not_found("gone", "b")));
    }

    #[test]
    fn memo_round_trips_through_claim_record() {
        let prepared = Prepared::new().with_memo(&vec![1, 2]).unwrap();
        let record = ClaimRecord {
            memo: prepared.memo,
            ..ClaimRecord::default()
        };
        assert_eq!(record.memo::<Vec<u32>>(), Ok(Some(vec![1, 2])));
    }
}
