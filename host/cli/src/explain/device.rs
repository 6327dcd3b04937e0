//! A device by each of its names, or the reason for which it is not offered.

use std::collections::BTreeMap;

use anyhow::Result;
use nodedock_proto::node::v1;

use super::devices;
use crate::client::Client;
use crate::output::{join, print_text};
use crate::{describe, names};
use nodedock_base::printable::one_line;
use nodedock_model::limit::LABEL_VALUE_BYTES_MAX;

pub(super) async fn device(mut client: Client, name: &str) -> Result<()> {
    let answer = devices(&mut client).await?;
    let lines = lines_of_device(&answer, name);
    if !lines.is_empty() {
        return print_text(&join(lines));
    }
    let unknown = names::unknown("device", name);
    let is_cut = |of: &&v1::LeftOut| of.count as usize > of.devices.len();
    let cut: Vec<_> = answer.left_out.iter().filter(is_cut).map(source).collect();
    if cut.is_empty() {
        return Err(unknown);
    }
    anyhow::bail!(
        "{unknown}; of the devices that are not offered by {}, only some are known by name",
        cut.join(", ")
    )
}

/// Describes every device of a name, offered or not.
fn lines_of_device(answer: &v1::ListDevicesResponse, name: &str) -> Vec<String> {
    let offered = answer.devices.iter().filter(|device| {
        // The node before a pool's name may be left away.
        let pool = device.pool.as_str();
        let local = pool.split_once('/').map_or(pool, |(_, local)| local);
        let paths = [
            [device.driver.as_str(), pool],
            [device.driver.as_str(), local],
            [device.extended_resource.as_str(), ""],
        ];
        paths
            .iter()
            .any(|of| is_called(&[of[0], of[1], &device.name], name))
    });
    let mut lines: Vec<_> = offered.flat_map(device_lines).collect();
    for of in &answer.left_out {
        for device in &of.devices {
            let v1::LeftOutDevice { name: own, reason } = device;
            let sources = [&of.driver, &of.extended_resource];
            let is_of = |from: &&String| is_called(&[from.as_str(), own.as_str()], name);
            if sources.iter().any(is_of) {
                lines.push(format!("{own} of {} is not offered: {reason}", source(of)));
            }
        }
    }
    lines
}

/// Returns whether a name is the end of a path, in whole parts: `gpu-0`, `gpus/gpu-0`, and `ttyS0` of `/dev/ttyS0`.
fn is_called(path: &[&str], name: &str) -> bool {
    let whole: Vec<_> = path.iter().flat_map(|part| parts(part)).collect();
    let name: Vec<_> = parts(name).collect();
    !name.is_empty() && whole.ends_with(&name)
}

fn parts(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty())
}

fn device_lines(device: &v1::Device) -> Vec<String> {
    let v1::Device {
        driver,
        pool,
        name,
        health,
        health_message,
        extended_resource,
        ..
    } = device;
    let of = [driver, pool].map(String::as_str);
    let of = of.into_iter().filter(|part| !part.is_empty());
    let mut lines = vec![format!(
        "{name} of {} is offered",
        of.collect::<Vec<_>>().join("/")
    )];
    let because = match health_message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    lines.push(format!("  health: {health}{because}"));
    let users = device
        .claims
        .iter()
        .map(|claim| format!("claim {}", describe::name(claim)));
    let pods = device
        .pods
        .iter()
        .map(|pod| format!("pod {}", describe::name(pod)));
    let users: Vec<_> = users.chain(pods).collect();
    let used = match users.as_slice() {
        [] => "  used by no claim and no pod".to_owned(),
        users => format!("  used by {}", users.join(", ")),
    };
    lines.push(used);
    if !extended_resource.is_empty() {
        lines.push(format!("  extended resource: {extended_resource}"));
    }
    let taints = device.taints.iter().map(describe::taint);
    lines.extend(taints.map(|taint| format!("  taint: {taint}")));
    let annotations: BTreeMap<_, _> = device.annotations.iter().collect();
    lines.extend(annotations.into_iter().map(|(key, value)| {
        let value = one_line(value, LABEL_VALUE_BYTES_MAX);
        format!("  annotation: {key}={value}")
    }));
    lines
}

/// Names what leaves out devices: a driver, or the device plugin of a resource.
fn source(left_out: &v1::LeftOut) -> String {
    let v1::LeftOut {
        driver,
        extended_resource,
        ..
    } = left_out;
    if extended_resource.is_empty() {
        driver.clone()
    } else {
        format!("the device plugin of {extended_resource}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::left_out;
    use super::*;

    #[test]
    fn device_explanation_has_left_out_devices() {
        let offered = |pool: &str| v1::Device {
            driver: "gpu.example.com".to_owned(),
            pool: pool.to_owned(),
            name: "gpu-0".to_owned(),
            health: "unhealthy".to_owned(),
            health_message: "too hot".to_owned(),
            annotations: [("b.example.com/slot", "4\n  free"), ("a", "")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            ..v1::Device::default()
        };
        let of_plugin = v1::LeftOut {
            driver: "/plugins/nic.sock".to_owned(),
            extended_resource: "example.com/nic".to_owned(),
            ..left_out()
        };
        let of_ports = v1::LeftOut {
            devices: vec![v1::LeftOutDevice {
                name: "/dev/ttyS0".to_owned(),
                reason: "it is a console".to_owned(),
            }],
            ..left_out()
        };
        let answer = v1::ListDevicesResponse {
            devices: vec![offered("node-1/a"), offered("node-1/b")],
            left_out: vec![left_out(), of_plugin, of_ports],
        };
        let lines = |name: &str| lines_of_device(&answer, name);
        assert_eq!(
            lines("gpu.example.com/a/gpu-0"),
            [
                "gpu-0 of gpu.example.com/node-1/a is offered",
                "  health: unhealthy: too hot",
                "  used by no claim and no pod",
                "  annotation: a=",
                "  annotation: b.example.com/slot=4   free",
            ]
        );
        assert_eq!(lines("node-1/a/gpu-0"), lines("a/gpu-0"));
        assert_eq!(lines("gpu-0").len(), 10);
        assert_eq!(
            lines("0000:3b:00.0"),
            [
                "0000:3b:00.0 of gpu.example.com is not offered: its IOMMU group is shared",
                "0000:3b:00.0 of the device plugin of example.com/nic is not offered: its IOMMU group is shared",
            ]
        );
        assert_eq!(lines("gpu.example.com/0000:3b:00.0").len(), 1);
        assert_eq!(lines("ttyS0"), lines("gpu.example.com/dev/ttyS0"));
        assert_eq!(lines("/dev/ttyS0").len(), 1);
        assert_eq!(lines("example.com/nic/0000:3b:00.0").len(), 1);
        for unknown in ["", "/", "0", "pu-0", "a", "yS0", "gpu.example.com"] {
            assert!(lines(unknown).is_empty(), "{unknown}");
        }
    }
}
