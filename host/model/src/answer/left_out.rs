//! Devices that a driver sees and does not offer.

use super::LeftOutDevice;
use crate::LeftOut;
use crate::check::{Field, Findings};
use crate::limit::{LEFT_OUT_MAX, LEFT_OUT_NAME_BYTES_MAX, LEFT_OUT_REASON_BYTES_MAX};

/// Checks the devices that a driver leaves out: at most 4,096, each with a name of at most 253 bytes and a reason of at most 1 KiB.
///
/// # Errors
///
/// What is wrong with them.
pub fn left_out(answer: Vec<LeftOutDevice>) -> Result<LeftOut, Findings> {
    let mut findings = Findings::default();
    findings.each(Field::Devices, &answer, LEFT_OUT_MAX, |at, device| {
        at.field(Field::Name, |at| {
            at.word(&device.name, LEFT_OUT_NAME_BYTES_MAX)
        });
        at.field(Field::Reason, |at| {
            at.word(&device.reason, LEFT_OUT_REASON_BYTES_MAX)
        });
    });
    if answer.len() <= LEFT_OUT_MAX {
        let names = answer.iter().map(|device| device.name.as_str());
        findings.unique(Field::Devices, names);
    }
    findings.accept(answer).map(LeftOut::of)
}
