//! A driver's description of itself, and its problems.

use super::Labels;
use crate::check::{Field, Findings, Reason};
use crate::grant::Capabilities;
use crate::limit::{
    DRIVER_VERSION_BYTES_MAX, EVENT_SUBSYSTEM_BYTES_MAX, EVENT_SUBSYSTEMS_MAX,
    PROBLEM_MESSAGE_BYTES_MAX, SUMMARY_BYTES_MAX,
};
use crate::rule::is_problem_code;
use crate::{DriverName, is_cdi_vendor_or_class};

/// Checked facts of a driver's description.
#[derive(Debug, Clone, Copy)]
pub struct Description<'a> {
    pub name: &'a str,
    pub version: &'a str,
    pub summary: &'a str,
    pub capabilities: &'a Capabilities,
    pub event_subsystems: &'a [String],
    pub annotations: &'a Labels,
}

/// Checks a description, and returns the driver's name.
///
/// # Errors
///
/// What is wrong with it.
pub fn description(answer: &Description<'_>) -> Result<DriverName, Findings> {
    let mut findings = Findings::default();
    let name = findings.parsed(DriverName::new(answer.name));
    if name.is_some() && !is_cdi_vendor_or_class(answer.name) {
        // Kubernetes allows other names.
        findings.field(Field::Name, |at| {
            let rule = "begins with a digit, and the vendor of a CDI device with a letter";
            at.require(false, answer.name, rule);
        });
    }
    findings.field(Field::Version, |at| version(at, answer.version));
    if let Err(why) = answer.capabilities.check() {
        findings.inconsistent(format!("capabilities: {why}"));
    }
    findings.field(Field::Summary, |at| {
        at.line(answer.summary, SUMMARY_BYTES_MAX)
    });
    let subsystems = answer.event_subsystems;
    findings.each(
        Field::EventSubsystems,
        subsystems,
        EVENT_SUBSYSTEMS_MAX,
        |at, name| {
            let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
            let is_name = (1..=EVENT_SUBSYSTEM_BYTES_MAX).contains(&name.len());
            let rule = "is not a name such as pci or drm";
            at.require(is_name && name.bytes().all(is_plain), name, rule);
        },
    );
    findings.labels(Field::Annotations, answer.annotations);
    match name {
        Some(name) => findings.accept(name),
        None => Err(findings),
    }
}

fn version(findings: &mut Findings, text: &str) {
    if !findings.bytes(text.len(), DRIVER_VERSION_BYTES_MAX) {
        return;
    }
    if let Err(error) = semver::Version::parse(text) {
        findings.require(false, text, &format!("is not a semantic version: {error}"));
    }
}

/// Checks a problem of a driver. The host cuts what is too long.
///
/// # Errors
///
/// What is wrong with it.
pub fn problem(code: &str, message: &str, details: &Labels) -> Result<(), Findings> {
    let mut findings = Findings::default();
    findings.field(Field::Code, |at| {
        at.require(
            is_problem_code(code),
            code,
            "is not lower-case words with dashes",
        );
    });
    findings.field(Field::Message, |at| match message {
        "" => at.add(Reason::Required),
        text => {
            at.bytes(text.len(), PROBLEM_MESSAGE_BYTES_MAX);
        }
    });
    findings.labels(Field::Details, details);
    findings.accept(())
}
