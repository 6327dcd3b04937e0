//! Drivers that keep a compiler busy: a good one, with functions that are never called.

use nodedock_tests::drivers::{Form, MOCK_GPU, wasm};

const TYPES: u8 = 1;
const FUNCTIONS: u8 = 3;
const CODE: u8 = 10;

/// A driver that serves and takes a compiler seconds: two thousand functions for each of `weight`.
pub(crate) fn slow(weight: u32) -> Vec<u8> {
    with_functions(weight * 2000, &branchy(100))
}

/// A driver with one function of 1.6 MB that takes a compiler more memory than any machine should give: fifty thousand values that
/// live through a hundred thousand branches.
pub(super) fn greedy() -> Vec<u8> {
    with_functions(1, &long_lived(49_000, 100_000))
}

/// A driver with more functions than are taken.
pub(super) fn many() -> Vec<u8> {
    with_functions(100_000, &[0, END])
}

/// A driver with a function that is longer than is taken.
pub(super) fn huge() -> Vec<u8> {
    with_functions(1, &long_lived(1, 400_000))
}

/// The example driver with more functions, all of them with this body and without parameters.
fn with_functions(count: u32, body: &[u8]) -> Vec<u8> {
    let module = wasm(MOCK_GPU, Form::Core);
    let (head, mut rest) = module.split_at(8);
    let (mut out, mut new_type) = (head.to_vec(), 0);
    while let Some((&id, after)) = rest.split_first() {
        let (length, after) = number(after);
        let (section, after) = after.split_at(length as usize);
        let (known, entries) = number(section);
        let section = match id {
            TYPES => {
                new_type = known;
                [&leb(known + 1), entries, b"\x60\0\0"].concat()
            }
            FUNCTIONS => [
                &leb(known + count),
                entries,
                &leb(new_type).repeat(count as usize),
            ]
            .concat(),
            CODE => {
                let function = [&leb(size(body)), body].concat();
                [
                    &leb(known + count),
                    entries,
                    &function.repeat(count as usize),
                ]
                .concat()
            }
            _ => section.to_vec(),
        };
        out.push(id);
        out.extend(leb(size(&section)));
        out.extend(section);
        rest = after;
    }
    out
}

/// Eight values, each in turn the product of others, between branches.
fn branchy(steps: u32) -> Vec<u8> {
    let mut body = vec![1, 8, I32];
    body.extend([MEMORY_SIZE, 0, SET, 0]);
    for step in 0..steps {
        let (from, to) = ((step % 8) as u8, ((step + 1) % 8) as u8);
        body.extend([
            GET, from, GET, 0, MUL, SET, to, BLOCK, EMPTY, GET, to, BR_IF, 0, END,
        ]);
    }
    body.push(END);
    body
}

/// Values that are all used at the end, after all branches.
fn long_lived(values: u32, branches: usize) -> Vec<u8> {
    let mut body = [&[1][..], &leb(values), &[I32, MEMORY_SIZE, 0, SET, 0]].concat();
    for value in 1..values {
        body.extend(
            [
                &[GET][..],
                &leb(value - 1),
                &[GET, 0, MUL, SET],
                &leb(value),
            ]
            .concat(),
        );
    }
    body.extend([BLOCK, EMPTY, GET, 0, BR_IF, 0, END].repeat(branches));
    body.extend([GET, 0]);
    for value in 1..values {
        body.extend([&[GET][..], &leb(value), &[ADD]].concat());
    }
    body.extend([DROP, END]);
    body
}

const I32: u8 = 0x7f;
const MEMORY_SIZE: u8 = 0x3f;
const GET: u8 = 0x20;
const SET: u8 = 0x21;
const MUL: u8 = 0x6c;
const ADD: u8 = 0x6a;
const BLOCK: u8 = 0x02;
const EMPTY: u8 = 0x40;
const BR_IF: u8 = 0x0d;
const DROP: u8 = 0x1a;
const END: u8 = 0x0b;

fn size(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("a section has less than 4 GiB")
}

/// An unsigned LEB128, as all numbers of the format are.
fn leb(mut number: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn number(bytes: &[u8]) -> (u32, &[u8]) {
    let length = bytes
        .iter()
        .position(|byte| byte & 0x80 == 0)
        .expect("a number has an end")
        + 1;
    let digits = bytes[..length].iter().rev();
    (
        digits.fold(0, |sum, byte| sum << 7 | u32::from(byte & 0x7f)),
        &bytes[length..],
    )
}
