//! The status of a device in a claim (`status.devices`).

use std::net::IpAddr;

use serde_json::{Map, Value};

use super::{Field, Findings, Reason};
use crate::limit::{
    CONDITION_MESSAGE_BYTES_MAX, CONDITION_REASON_BYTES_MAX, HARDWARE_ADDRESS_BYTES_MAX,
    INTERFACE_NAME_BYTES_MAX, STATUS_DATA_BYTES_MAX, STATUS_IPS_MAX,
};
use crate::{NetworkData, is_label_key};

/// Checks the type of a condition (`metav1.Condition`).
pub fn condition_type(findings: &mut Findings, text: &str) {
    let rule = "is no qualified name, such as Ready or example.com/attached";
    findings.field(Field::Kind, |at| at.require(is_label_key(text), text, rule));
}

/// Checks the reason of a condition (`metav1.Condition`).
pub fn condition_reason(findings: &mut Findings, text: &str) {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"_,:".contains(&byte);
    let has_form = text.starts_with(|first: char| first.is_ascii_alphabetic())
        && !text.ends_with([',', ':'])
        && text.bytes().all(inner);
    let rule = "is not of A-Z, a-z, 0-9, '_', ',' and ':', with a letter first and neither ',' nor ':' last";
    findings.field(Field::Reason, |at| {
        if text.is_empty() {
            at.add(Reason::Required);
        } else if at.bytes(text.len(), CONDITION_REASON_BYTES_MAX) {
            at.require(has_form, text, rule);
        }
    });
}

/// Checks the message of a condition (`metav1.Condition`).
pub fn condition_message(findings: &mut Findings, text: &str) {
    findings.field(Field::Message, |at| {
        at.bytes(text.len(), CONDITION_MESSAGE_BYTES_MAX)
    });
}

/// Checks the document of a driver, and returns it.
pub fn data(findings: &mut Findings, text: &str) -> Option<Map<String, Value>> {
    findings.field(Field::Data, |at| {
        if !at.bytes(text.len(), STATUS_DATA_BYTES_MAX) {
            return None;
        }
        let parsed = serde_json::from_str(text);
        at.parsed(parsed.map_err(|error| format!("it is not a JSON object: {error}")))
    })
}

/// Checks the name of an interface.
pub fn interface_name(findings: &mut Findings, text: &str) -> bool {
    findings.field(Field::InterfaceName, |at| {
        at.bytes(text.len(), INTERFACE_NAME_BYTES_MAX)
    })
}

/// Checks a hardware address.
pub fn hardware_address(findings: &mut Findings, text: &str) -> bool {
    findings.field(Field::HardwareAddress, |at| {
        at.bytes(text.len(), HARDWARE_ADDRESS_BYTES_MAX)
    })
}

/// Checks network data whose addresses are canonical.
pub fn network(findings: &mut Findings, network: &NetworkData) {
    interface_name(findings, &network.interface_name);
    hardware_address(findings, &network.hardware_address);
    findings.each(Field::Ips, &network.ips, STATUS_IPS_MAX, |at, ip| {
        if let Some(canonical) = interface_address(at, ip).filter(|canonical| canonical != ip) {
            at.require(false, ip, &format!("is not canonical: {canonical}"));
        }
    });
    if network.ips.len() <= STATUS_IPS_MAX {
        findings.unique(Field::Ips, network.ips.iter().map(String::as_str));
    }
}

/// Checks an address with the length of its prefix, and returns its canonical form, the only one that an API server takes. It takes no
/// IPv4 address in the form of an IPv6 address.
pub fn interface_address(findings: &mut Findings, text: &str) -> Option<String> {
    let canonical = canonical(text);
    let rule = "is not an address such as 192.0.2.1/24";
    findings.require(canonical.is_some(), text, rule);
    canonical
}

fn canonical(text: &str) -> Option<String> {
    let (address, length) = text.split_once('/')?;
    let bits = match address.parse().ok()? {
        IpAddr::V4(_) => 32,
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => return None,
        IpAddr::V6(_) => 128,
    };
    let is_number = (1..=3).contains(&length.len()) && length.bytes().all(|b| b.is_ascii_digit());
    let length: u8 = length.parse().ok()?;
    let address: IpAddr = address.parse().ok()?;
    (is_number && length <= bits).then(|| format!("{address}/{length}"))
}
