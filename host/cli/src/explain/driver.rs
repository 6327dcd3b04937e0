//! The state of a driver, its problems and its history; of one that is not here, the claims that it prepared.

use anyhow::Result;
use nodedock_proto::node::v1;

use super::{condition_lines, devices, history, left_out_lines};
use crate::client::Client;
use crate::output::{join, print_text};
use crate::{describe, names};
use nodedock_base::clock::rfc3339;

pub(super) async fn driver(mut client: Client, name: &str) -> Result<()> {
    let request = v1::ListDriversRequest {
        name: name.to_owned(),
    };
    let drivers = client.list_drivers(request).await?.into_inner().drivers;
    let node = client.get_node(v1::GetNodeRequest {}).await?.into_inner();
    if !drivers.is_empty() {
        let left_out = devices(&mut client).await?.left_out;
        let lines = drivers.iter().flat_map(|driver| {
            let of_driver = node
                .conditions
                .iter()
                .filter(|condition| is_of_driver(condition, driver));
            let left_out = left_out.iter().filter(|of| of.driver == driver.name);
            driver_lines(driver, of_driver, left_out)
        });
        return print_text(&join(lines));
    }
    let claims = client
        .list_claims(v1::ListClaimsRequest::default())
        .await?
        .into_inner()
        .claims;
    let lines = absent_driver_lines(name, &claims);
    if lines.is_empty() {
        Err(names::unknown("driver", name))
    } else {
        print_text(&join(lines))
    }
}

/// Returns whether a condition is of a driver: its subject is the driver, its file or socket, or one of its pools.
fn is_of_driver(condition: &v1::Condition, driver: &v1::Driver) -> bool {
    let v1::Driver { name, source, .. } = driver;
    let subject = &condition.subject;
    let is_pool = || {
        let rest = subject.strip_prefix(name.as_str());
        rest.is_some_and(|rest| rest.starts_with('/'))
    };
    subject == source || !name.is_empty() && (subject == name || is_pool())
}

/// A driver that is not here, with the claims that it prepared; nothing if it prepared none.
fn absent_driver_lines(name: &str, claims: &[v1::ClaimStatus]) -> Vec<String> {
    let parts = claims.iter().flat_map(|claim| {
        let of_driver = claim.drivers.iter().filter(|part| part.driver == name);
        of_driver.map(|part| {
            let id = claim.id.as_ref().map(describe::name).unwrap_or_default();
            format!(
                "  claim {id} is {}: {}",
                part.state,
                part.devices.join(", ")
            )
        })
    });
    let parts: Vec<_> = parts.collect();
    if parts.is_empty() {
        return parts;
    }
    let first = format!("{name} is not here, and has claims");
    let next = "  next: the claims are unprepared by the driver when it is back, or released by `nodedock release claim`";
    [first]
        .into_iter()
        .chain(parts)
        .chain([next.to_owned()])
        .collect()
}

/// `conditions` and `left_out`: of this driver.
fn driver_lines<'a>(
    driver: &v1::Driver,
    conditions: impl IntoIterator<Item = &'a v1::Condition>,
    left_out: impl IntoIterator<Item = &'a v1::LeftOut>,
) -> Vec<String> {
    let name = if driver.name.is_empty() {
        "driver of unknown name"
    } else {
        &driver.name
    };
    let mut lines = vec![format!(
        "{name} ({}, {}) is {}",
        driver.kind, driver.source, driver.state
    )];
    let facts = [
        ("summary", &driver.summary),
        ("version", &driver.version),
        ("digest", &driver.digest),
        ("parameters", &driver.parameters),
        ("reason", &driver.reason),
    ];
    let facts = facts.into_iter().filter(|(_, text)| !text.is_empty());
    lines.extend(facts.map(|(label, text)| format!("  {label}: {text}")));
    lines.extend(
        driver
            .missing_grants
            .iter()
            .map(|missing| format!("  not granted: {missing}")),
    );
    let trust = driver
        .trust
        .as_ref()
        .filter(|trust| trust.mode != "off" || !trust.key.is_empty() || !trust.pin.is_empty());
    lines.extend(trust.map(|trust| format!("  trust: {}", describe::trust(trust))));
    if driver.discovered_ms > 0 {
        lines.push(format!(
            "  {} devices, last polled on {}",
            driver.devices,
            rfc3339(driver.discovered_ms)
        ));
    }
    lines.extend(driver.native.iter().flat_map(native_lines));
    lines.extend(describe::problem(&driver.problem, "  "));
    // The reason above is not repeated.
    let is_new = |condition: &v1::Condition| {
        let problem = condition.problem.as_ref();
        problem.is_some_and(|problem| {
            driver.reason.is_empty() || !problem.message.contains(&driver.reason)
        })
    };
    lines.extend(condition_lines(conditions, is_new));
    lines.extend(left_out.into_iter().flat_map(left_out_lines));
    lines.extend(history(&driver.timeline));
    lines
}

fn native_lines(plugin: &v1::NativePlugin) -> Vec<String> {
    let mut lines = vec![
        format!("  {}: {}", plugin.connection, plugin.endpoint),
        format!("  services: {}", plugin.services.join(", ")),
    ];
    lines.extend(plugin.health.iter().map(|device| {
        let why = if device.message.is_empty() {
            String::new()
        } else {
            format!(": {}", device.message)
        };
        format!(
            "  device {}/{} is {}{why}",
            device.pool, device.device, device.health
        )
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{condition, left_out};
    use super::*;

    #[test]
    fn driver_explanation_has_its_conditions() {
        let driver = v1::Driver {
            name: "gpu.example.com".into(),
            source: "gpu.wasm".into(),
            state: "failed".into(),
            reason: "no code".into(),
            ..Default::default()
        };
        let conditions = [
            condition("gpu.wasm", "gpu.wasm is failed: no code"),
            condition("gpu.example.com", "claims hold devices"),
            condition("gpu.example.com/gpus", "slices are changed"),
            condition("gpu.example.com.other/gpus", "another"),
            condition("", "of the daemon"),
        ];
        let of_driver = conditions.iter().filter(|of| is_of_driver(of, &driver));
        let text = join(driver_lines(&driver, of_driver, &[left_out()]));
        assert_eq!(text.matches("no code").count(), 1, "{text}");
        for part in [
            "claims hold devices",
            "slices are changed",
            "  not offered: 3 devices\n    0000:3b:00.0: its IOMMU group is shared\n    and 2 more",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        for part in ["another", "of the daemon"] {
            assert!(!text.contains(part), "{part}: {text}");
        }
        let nameless = v1::Driver {
            name: String::new(),
            ..driver
        };
        assert!(!is_of_driver(&conditions[4], &nameless));
        assert!(!is_of_driver(
            &condition("/var", "of a directory"),
            &nameless
        ));
    }

    #[test]
    fn missing_driver_is_explained_by_claims() {
        let part = |driver: &str| v1::ClaimDriver {
            driver: driver.to_owned(),
            state: "prepared".to_owned(),
            devices: vec!["gpus/gpu-0".to_owned()],
            ..Default::default()
        };
        let id = v1::ObjectRef {
            namespace: "ml".into(),
            name: "train".into(),
            ..Default::default()
        };
        let claim = v1::ClaimStatus {
            id: Some(id),
            drivers: vec![part("gpu.example.com"), part("nic.example.com")],
            ..Default::default()
        };
        let lines = absent_driver_lines("gpu.example.com", std::slice::from_ref(&claim));
        assert_eq!(lines[0], "gpu.example.com is not here, and has claims");
        assert_eq!(lines[1], "  claim ml/train is prepared: gpus/gpu-0");
        assert!(
            lines.len() == 3 && lines[2].contains("nodedock release claim"),
            "{lines:?}"
        );
        assert!(absent_driver_lines("fan.example.com", &[claim]).is_empty());
    }
}
