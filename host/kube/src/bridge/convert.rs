//! The kubelet's messages and ours. The versions of an API have the same fields, but for a device's share.

pub(super) mod health;

use std::path::Path;

use nodedock_proto::kubelet::registration as wire;

use super::asked::Asked;
use nodedock_base::printable::one_line;
use nodedock_model::limit::PROBLEM_MESSAGE_BYTES_MAX;
use nodedock_model::{DraService, HealthService};
use nodedock_model::{DriverName, KubeletDevice, Problem};

/// Outcomes of a call by the UIDs that were asked for.
pub(super) type Outcomes = Vec<(String, Result<Vec<KubeletDevice>, Problem>)>;

/// Who a driver is. A kubelet takes the first service that it knows, so the newest stands first.
pub(super) fn plugin_info(driver: &DriverName, endpoint: &Path) -> wire::PluginInfo {
    let services = DraService::ALL.map(DraService::listed_as);
    let health = HealthService::ALL.map(HealthService::listed_as);
    wire::PluginInfo {
        r#type: "DRAPlugin".to_owned(),
        name: driver.to_string(),
        endpoint: endpoint.display().to_string(),
        supported_versions: services.into_iter().chain(health).map(str::to_owned).collect(),
    }
}

/// A problem in the words of one claim's answer: they end up in an Event of the pod.
fn words(problem: &Problem) -> String {
    one_line(&format!("{} ({})", problem.message, problem.code), PROBLEM_MESSAGE_BYTES_MAX + 128)
}

macro_rules! dra_version {
    ($version:ident, |$device:ident| $share:expr) => {
        pub(super) mod $version {
            use nodedock_proto::kubelet::dra::$version as wire;

            use super::{Asked, KubeletDevice, Outcomes, words};

            pub(in super::super) fn asked(claims: Vec<wire::Claim>) -> Vec<Asked> {
                let asked = |claim: wire::Claim| Asked {
                    namespace: claim.namespace,
                    name: claim.name,
                    uid: claim.uid,
                };
                claims.into_iter().map(asked).collect()
            }

            pub(in super::super) fn prepared(outcomes: Outcomes) -> wire::NodePrepareResourcesResponse {
                let one = |outcome| match outcome {
                    Ok(devices) => wire::NodePrepareResourceResponse {
                        devices: Vec::into_iter(devices).map(device).collect(),
                        error: String::new(),
                    },
                    Err(problem) => {
                        wire::NodePrepareResourceResponse { devices: Vec::new(), error: words(&problem) }
                    }
                };
                outcomes.into_iter().map(|(uid, outcome)| (uid, one(outcome))).collect()
            }

            pub(in super::super) fn unprepared(outcomes: Outcomes) -> wire::NodeUnprepareResourcesResponse {
                let error = |outcome: Result<_, _>| outcome.err().as_ref().map(words).unwrap_or_default();
                let one = |outcome| wire::NodeUnprepareResourceResponse { error: error(outcome) };
                outcomes.into_iter().map(|(uid, outcome)| (uid, one(outcome))).collect()
            }

            fn device($device: KubeletDevice) -> wire::Device {
                let mut device = $share;
                device.request_names = $device.requests;
                device.pool_name = $device.pool.to_string();
                device.device_name = $device.device.to_string();
                device.cdi_device_ids = $device.cdi;
                device
            }
        }
    };
}

dra_version!(v1, |device| wire::Device { share_id: device.share_id.clone(), ..Default::default() });
dra_version!(v1beta1, |device| wire::Device::default());

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::{DeviceName, PoolName};

    fn device() -> KubeletDevice {
        KubeletDevice {
            requests: vec!["gpu".into()],
            pool: PoolName::new("node-1").unwrap(),
            device: DeviceName::new("gpu-0").unwrap(),
            cdi: vec!["example.com/gpu=0".into(), "example.com/gpu=1".into()],
            share_id: Some("s-1".into()),
        }
    }

    #[test]
    fn every_claim_has_an_answer_and_an_empty_one_is_there_too() {
        let refused = Problem::conflict("device-held", "claim default/a\nholds it");
        let outcomes: Outcomes =
            vec![("u1".into(), Ok(vec![device()])), ("u2".into(), Ok(Vec::new())), ("".into(), Err(refused))];
        let v1 = v1::prepared(outcomes.clone()).into_claims();
        assert_eq!(v1.len(), 3);
        let found = &v1["u1"].devices[0];
        assert_eq!((found.pool_name.as_str(), found.device_name.as_str()), ("node-1", "gpu-0"));
        assert_eq!((&found.request_names[..], found.cdi_device_ids.len()), (&["gpu".to_owned()][..], 2));
        assert_eq!(found.share_id.as_deref(), Some("s-1"));
        assert_eq!(v1["u2"], Default::default());
        assert_eq!(v1[""].error, "claim default/a holds it (device-held)");
        let beta = v1beta1::prepared(outcomes.clone()).into_claims();
        assert_eq!((&beta["u1"].devices[0].device_name[..], &beta[""].error), ("gpu-0", &v1[""].error));
        let gone = v1::unprepared(outcomes.clone()).into_claims();
        assert_eq!((gone.len(), &gone["u1"].error[..], &gone[""].error), (3, "", &v1[""].error));
        assert_eq!(v1beta1::unprepared(outcomes).into_claims().len(), 3);
    }

    #[test]
    fn the_newest_services_are_listed_first() {
        let name = DriverName::new("gpu.example.com").unwrap();
        let info = plugin_info(&name, Path::new("/k/plugins/gpu.example.com/dra.sock"));
        assert_eq!((&info.r#type[..], &info.name[..]), ("DRAPlugin", "gpu.example.com"));
        let expected =
            ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
        assert_eq!(info.supported_versions, expected);
        assert_eq!(info.endpoint, "/k/plugins/gpu.example.com/dra.sock");
    }
}
