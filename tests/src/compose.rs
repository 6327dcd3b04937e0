//! Pods and claims as agents send them.

use nodedock_proto::node::v1;

use crate::drivers::MOCK_GPU_NAME;

/// Returns a pod, whose names for its claims are those of the claims.
pub fn pod(name: &str) -> v1::ObjectRef {
    v1::ObjectRef {
        namespace: "default".to_owned(),
        name: name.to_owned(),
        uid: format!("pod-{name}"),
    }
}

/// A device, as `DRIVER/POOL/DEVICE`, for a request of its own.
pub fn allocated(request: &str, device: &str) -> v1::AllocatedDevice {
    let (driver, rest) = device.split_once('/').expect("DRIVER/POOL/DEVICE");
    let (pool, device) = rest.rsplit_once('/').expect("DRIVER/POOL/DEVICE");
    let (request, driver) = (request.to_owned(), driver.to_owned());
    v1::AllocatedDevice {
        request,
        driver,
        pool: pool.to_owned(),
        device: device.to_owned(),
        ..Default::default()
    }
}

/// A claim for which devices were allocated, without a consumer yet. Its requests are `device-0`, `device-1`, …
pub fn claim(name: &str, devices: &[&str]) -> v1::Claim {
    let id = v1::ObjectRef {
        namespace: "default".to_owned(),
        name: name.to_owned(),
        uid: format!("claim-{name}"),
    };
    let devices = devices
        .iter()
        .enumerate()
        .map(|(i, device)| allocated(&format!("device-{i}"), device));
    let allocation = v1::Allocation {
        devices: devices.collect(),
        ..Default::default()
    };
    v1::Claim {
        id: Some(id),
        allocation: Some(allocation),
        ..Default::default()
    }
}

/// A claim for simulated GPUs, each as `POOL/DEVICE`.
pub fn gpu_claim(name: &str, devices: &[&str]) -> v1::Claim {
    let devices: Vec<_> = devices
        .iter()
        .map(|device| format!("{MOCK_GPU_NAME}/{device}"))
        .collect();
    claim(
        name,
        &devices.iter().map(String::as_str).collect::<Vec<_>>(),
    )
}

/// Parameters of a claim's author for simulated GPUs.
pub fn with_parameters(mut claim: v1::Claim, parameters: &str) -> v1::Claim {
    let config = v1::OpaqueConfig {
        source: "FromClaim".to_owned(),
        requests: Vec::new(),
        driver: MOCK_GPU_NAME.to_owned(),
        parameters: parameters.to_owned(),
    };
    claim
        .allocation
        .as_mut()
        .expect("the claim is allocated")
        .configs
        .push(config);
    claim
}

/// A pod with one container that uses the claims, which are reserved for it.
pub fn request(pod: &v1::ObjectRef, claims: &[&v1::Claim]) -> v1::PreparePodRequest {
    let name = |claim: &v1::Claim| {
        claim
            .id
            .as_ref()
            .map(|id| id.name.clone())
            .unwrap_or_default()
    };
    let reference = |claim: &&v1::Claim| v1::ClaimReference {
        pod_claim_name: name(claim),
        claim_name: name(claim),
        claim_uid: String::new(),
    };
    let uses = |claim: &&v1::Claim| v1::ContainerClaim {
        pod_claim_name: name(claim),
        request: String::new(),
    };
    let container = v1::Container {
        name: "main".to_owned(),
        claims: claims.iter().map(uses).collect(),
        ..Default::default()
    };
    v1::PreparePodRequest {
        pod: Some(pod.clone()),
        claims: claims.iter().map(reference).collect(),
        containers: vec![container],
        inline_claims: claims
            .iter()
            .map(|claim| reserved((*claim).clone(), pod))
            .collect(),
        ..v1::PreparePodRequest::default()
    }
}

/// A pod with a claim of the local API.
pub fn of_claim(pod: &v1::ObjectRef, claim: &str) -> v1::PreparePodRequest {
    let pod_claim_name = "gpu".to_owned();
    let reference = v1::ClaimReference {
        pod_claim_name: pod_claim_name.clone(),
        claim_name: claim.to_owned(),
        claim_uid: String::new(),
    };
    let container = v1::Container {
        name: "main".to_owned(),
        claims: vec![v1::ContainerClaim {
            pod_claim_name,
            request: String::new(),
        }],
        ..v1::Container::default()
    };
    v1::PreparePodRequest {
        pod: Some(pod.clone()),
        claims: vec![reference],
        containers: vec![container],
        ..v1::PreparePodRequest::default()
    }
}

/// The claim with one more consumer.
pub fn reserved(mut claim: v1::Claim, pod: &v1::ObjectRef) -> v1::Claim {
    let (resource, name, uid) = ("pods".to_owned(), pod.name.clone(), pod.uid.clone());
    claim.reserved_for.push(v1::Consumer {
        resource,
        name,
        uid,
        ..v1::Consumer::default()
    });
    claim
}
