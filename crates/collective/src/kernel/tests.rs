//! Every kernel against plain loops, bit by bit.

use super::*;
use proptest::prelude::*;

const LENGTHS: [usize; 17] = [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 191, 256, 257, 1000];

fn levels() -> Vec<Level> {
    let all = [
        Level::Portable,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512,
    ];
    all.into_iter().filter(|level| *level as u8 <= Level::detect() as u8).collect()
}

/// One element as its bytes, read by the reference without any code of the kernels.
#[derive(Clone, Copy)]
enum Value {
    Integer(i64),
    Single(f32),
    Double(f64),
    Truth(bool),
}

fn read(dtype: DType, bytes: &[u8]) -> Value {
    match dtype {
        DType::Bool => Value::Truth(bytes[0] != 0),
        DType::U8 => Value::Integer(i64::from(bytes[0])),
        DType::I8 => Value::Integer(i64::from(bytes[0] as i8)),
        DType::I16 => Value::Integer(i64::from(i16::from_ne_bytes(bytes.try_into().unwrap()))),
        DType::I32 => Value::Integer(i64::from(i32::from_ne_bytes(bytes.try_into().unwrap()))),
        DType::I64 => Value::Integer(i64::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F16 => Value::Single(f16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()),
        DType::Bf16 => Value::Single(bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()),
        DType::F32 => Value::Single(f32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F64 => Value::Double(f64::from_ne_bytes(bytes.try_into().unwrap())),
    }
}

fn write(dtype: DType, value: Value) -> Vec<u8> {
    match (dtype, value) {
        (DType::Bool, Value::Truth(value)) => vec![u8::from(value)],
        (DType::U8, Value::Integer(value)) => vec![value as u8],
        (DType::I8, Value::Integer(value)) => vec![value as u8],
        (DType::I16, Value::Integer(value)) => (value as i16).to_ne_bytes().to_vec(),
        (DType::I32, Value::Integer(value)) => (value as i32).to_ne_bytes().to_vec(),
        (DType::I64, Value::Integer(value)) => value.to_ne_bytes().to_vec(),
        (DType::F16, Value::Single(value)) if value.is_nan() => f16::NAN.to_ne_bytes().to_vec(),
        (DType::F16, Value::Single(value)) => f16::from_f32(value).to_ne_bytes().to_vec(),
        (DType::Bf16, Value::Single(value)) if value.is_nan() => bf16::NAN.to_ne_bytes().to_vec(),
        (DType::Bf16, Value::Single(value)) => bf16::from_f32(value).to_ne_bytes().to_vec(),
        (DType::F32, Value::Single(value)) if value.is_nan() => f32::NAN.to_ne_bytes().to_vec(),
        (DType::F32, Value::Single(value)) => value.to_ne_bytes().to_vec(),
        (DType::F64, Value::Double(value)) if value.is_nan() => f64::NAN.to_ne_bytes().to_vec(),
        (DType::F64, Value::Double(value)) => value.to_ne_bytes().to_vec(),
        _ => unreachable!("{dtype:?} does not hold such a value"),
    }
}

/// Brings an integer back into the type, as its arithmetic wraps.
fn wrap(dtype: DType, value: i64) -> Value {
    read(dtype, &write(dtype, Value::Integer(value)))
}

fn scale(dtype: DType, value: Value, factor: f64) -> Value {
    match value {
        _ if factor == 1.0 => value,
        Value::Integer(value) => Value::Integer(match dtype {
            DType::U8 => i64::from((value as f64 * factor) as u8),
            DType::I8 => i64::from((value as f64 * factor) as i8),
            DType::I16 => i64::from((value as f64 * factor) as i16),
            DType::I32 => i64::from((value as f64 * factor) as i32),
            _ => (value as f64 * factor) as i64,
        }),
        Value::Single(value) => Value::Single(value * factor as f32),
        Value::Double(value) => Value::Double(value * factor),
        Value::Truth(value) => Value::Truth((f64::from(u8::from(value)) * factor) as u8 != 0),
    }
}

fn extreme(one: f64, other: f64, smallest: bool) -> f64 {
    let one_wins = match one.partial_cmp(&other) {
        None => return f64::NAN,
        Some(std::cmp::Ordering::Equal) => one.is_sign_negative() == smallest,
        Some(order) => order.is_lt() == smallest,
    };
    if one_wins { one } else { other }
}

fn combine(dtype: DType, op: ReduceOp, one: Value, other: Value) -> Value {
    match (one, other) {
        (Value::Integer(one), Value::Integer(other)) => match op {
            ReduceOp::Sum | ReduceOp::Mean => wrap(dtype, one.wrapping_add(other)),
            ReduceOp::Product => wrap(dtype, one.wrapping_mul(other)),
            ReduceOp::Min => Value::Integer(Ord::min(one, other)),
            ReduceOp::Max => Value::Integer(Ord::max(one, other)),
        },
        (Value::Single(one), Value::Single(other)) => Value::Single(match op {
            ReduceOp::Sum | ReduceOp::Mean => one + other,
            ReduceOp::Product => one * other,
            _ => extreme(f64::from(one), f64::from(other), op == ReduceOp::Min) as f32,
        }),
        (Value::Double(one), Value::Double(other)) => Value::Double(match op {
            ReduceOp::Sum | ReduceOp::Mean => one + other,
            ReduceOp::Product => one * other,
            _ => extreme(one, other, op == ReduceOp::Min),
        }),
        (Value::Truth(one), Value::Truth(other)) => Value::Truth(match op {
            ReduceOp::Sum | ReduceOp::Max => one || other,
            ReduceOp::Mean | ReduceOp::Min | ReduceOp::Product => one && other,
        }),
        _ => unreachable!("values of one type"),
    }
}

fn divide(value: Value, divisor: usize) -> Value {
    match value {
        _ if divisor == 1 => value,
        Value::Integer(value) => Value::Integer(value / divisor as i64),
        Value::Single(value) => Value::Single(value / divisor as f32),
        Value::Double(value) => Value::Double(value / divisor as f64),
        Value::Truth(_) => value,
    }
}

fn reference(dtype: DType, steps: &Steps, srcs: &[Vec<u8>]) -> Vec<u8> {
    let size = dtype.size();
    (0..srcs[0].len() / size)
        .flat_map(|i| {
            let inputs = srcs.iter().map(|src| read(dtype, &src[i * size..(i + 1) * size]));
            let combined = inputs
                .map(|value| scale(dtype, value, steps.prescale))
                .reduce(|one, other| combine(dtype, steps.op, one, other))
                .unwrap();
            write(dtype, scale(dtype, divide(combined, steps.divide_by), steps.postscale))
        })
        .collect()
}

/// Memory aligned for an element and for no more, so that no kernel comes to rely on more.
struct Memory {
    words: Vec<u64>,
    offset: usize,
    bytes: usize,
}

impl Memory {
    fn new(dtype: DType, content: &[u8]) -> Self {
        let mut memory = Self {
            words: vec![0; content.len() / 8 + 4],
            offset: dtype.size(),
            bytes: content.len(),
        };
        memory.bytes_mut().copy_from_slice(content);
        memory
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the bytes lie within the vector.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.bytes) }
    }

    fn pointer(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast::<u8>().wrapping_add(self.offset)
    }
}

/// Runs a kernel with the first `in_place` sources also as destinations and `fresh` further
/// destinations.
fn run(
    level: Level,
    dtype: DType,
    steps: &Steps,
    srcs: &[Vec<u8>],
    in_place: usize,
    fresh: usize,
) -> Vec<Vec<u8>> {
    let mut inputs: Vec<_> = srcs.iter().map(|src| Memory::new(dtype, src)).collect();
    let mut outputs: Vec<_> =
        (0..fresh).map(|_| Memory::new(dtype, &vec![0xa5; srcs[0].len()])).collect();
    let pointers: Vec<_> = inputs.iter_mut().map(|input| input.pointer()).collect();
    let sources: Vec<_> = pointers.iter().map(|pointer| pointer.cast_const()).collect();
    let mut destinations = pointers[..in_place].to_vec();
    destinations.extend(outputs.iter_mut().map(|output| output.pointer()));
    // SAFETY: every pointer is valid for the length of the first source, which all sources
    // have.
    unsafe {
        kernel(level, dtype, steps.op)(steps, &sources, &destinations, srcs[0].len() / dtype.size())
    };
    for (untouched, src) in inputs[in_place..].iter_mut().zip(&srcs[in_place..]) {
        assert_eq!(untouched.bytes_mut(), src, "a source that is no destination was written");
    }
    inputs[..in_place]
        .iter_mut()
        .chain(&mut outputs)
        .map(|memory| memory.bytes_mut().to_vec())
        .collect()
}

fn check(dtype: DType, steps: &Steps, srcs: &[Vec<u8>], in_place: usize, fresh: usize) {
    let expected = reference(dtype, steps, srcs);
    for level in levels() {
        for result in run(level, dtype, steps, srcs, in_place, fresh) {
            if let Some(at) = (0..expected.len()).find(|at| result[*at] != expected[*at]) {
                let element =
                    at / dtype.size() * dtype.size()..(at / dtype.size() + 1) * dtype.size();
                let inputs: Vec<_> = srcs.iter().map(|src| &src[element.clone()]).collect();
                panic!(
                    "{level:?} {dtype:?} {steps:?} {} of {}: {inputs:x?} gave {:x?}, not {:x?}",
                    at / dtype.size(),
                    expected.len() / dtype.size(),
                    &result[element.clone()],
                    &expected[element]
                );
            }
        }
    }
}

/// Bytes without order: every kind of number comes up in the small types, NaN and subnormals
/// too.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}

/// Mostly moderate numbers, some special ones: noise alone overflows a float too often to say
/// much.
fn numbers(dtype: DType, seed: u64, len: usize) -> Vec<u8> {
    let random = noise(seed, len * dtype.size());
    let specials = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
        65504.0,
        6e-8,
        1e-40,
        -1e-5,
    ];
    let float = |bytes: &[u8]| match bytes[0] {
        picked @ 0..40 => specials[usize::from(picked % 10)],
        _ => (f32::from(bytes[0]) - 140.0) / (f32::from(bytes[1]) + 3.0),
    };
    match dtype {
        DType::F16 => {
            random.chunks(2).flat_map(|bytes| f16::from_f32(float(bytes)).to_ne_bytes()).collect()
        }
        DType::Bf16 => {
            random.chunks(2).flat_map(|bytes| bf16::from_f32(float(bytes)).to_ne_bytes()).collect()
        }
        DType::F32 => random.chunks(4).flat_map(|bytes| float(bytes).to_ne_bytes()).collect(),
        DType::F64 => {
            random.chunks(8).flat_map(|bytes| f64::from(float(bytes)).to_ne_bytes()).collect()
        }
        DType::Bool => random.iter().map(|byte| if byte % 3 == 0 { 0 } else { *byte }).collect(),
        _ => random,
    }
}

fn sources(dtype: DType, count: usize, len: usize) -> Vec<Vec<u8>> {
    (0..count).map(|seed| numbers(dtype, seed as u64 + 1, len)).collect()
}

const SCALES: [(f64, f64); 5] =
    [(1.0, 1.0), (0.5, 1.0), (1.0, -3.75), (1e3, 1e-3), (f64::NAN, f64::INFINITY)];

#[test]
fn every_type_operation_and_length_equals_the_reference() {
    for dtype in DType::ALL {
        for op in ReduceOp::ALL {
            for count in 1..=5 {
                for len in LENGTHS {
                    let srcs = sources(dtype, count, len);
                    check(dtype, &Steps::combine(op), &srcs, 0, 1);
                    let (prescale, postscale) = SCALES[(len + count) % SCALES.len()];
                    let reduction = Reduction { op, prescale, postscale };
                    check(dtype, &Steps::whole(reduction, count), &srcs, 0, 1);
                    check(dtype, &Steps::whole(reduction, count), &srcs, count, 2);
                }
            }
        }
    }
}

#[test]
fn every_scale_equals_the_reference() {
    for dtype in DType::ALL {
        for op in ReduceOp::ALL {
            for (prescale, postscale) in SCALES {
                for ranks in [1, 3, 128, 300] {
                    let steps = Steps::whole(Reduction { op, prescale, postscale }, ranks);
                    check(dtype, &steps, &sources(dtype, 3, 300), 1, 0);
                    check(
                        dtype,
                        &steps,
                        &(7..9).map(|seed| noise(seed, 2400)).collect::<Vec<_>>(),
                        0,
                        1,
                    );
                }
            }
        }
    }
}

#[test]
fn as_many_sources_and_destinations_as_there_are_ranks() {
    for dtype in DType::ALL {
        for count in [6, 7, 8, 16, 33, 64] {
            let steps = Steps::whole(ReduceOp::Mean.into(), count);
            check(dtype, &steps, &sources(dtype, count, 77), count, 0);
            check(dtype, &steps, &sources(dtype, count, 77), 0, 64);
        }
    }
}

#[test]
fn every_half_number_comes_back() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    let srcs = [all];
    check(DType::F16, &Steps::combine(ReduceOp::Sum), &srcs, 0, 1);
    check(DType::Bf16, &Steps::combine(ReduceOp::Sum), &srcs, 0, 1);
    for bits in 0..=u16::MAX {
        for (wide, expected) in [
            (f16::from_bits(bits).widen(), f16::from_bits(bits).to_f32()),
            (bf16::from_bits(bits).widen(), bf16::from_bits(bits).to_f32()),
        ] {
            assert!(
                wide.to_bits() == expected.to_bits() || wide.is_nan() && expected.is_nan(),
                "{bits:x}"
            );
        }
    }
}

#[test]
fn halves_round_to_nearest_even() {
    // Around every half number: the middle to the next one, and the neighbours of both in f32.
    let narrow = |number: f32| {
        let half = f16::narrow(number).to_bits();
        let brain = bf16::narrow(number).to_bits();
        if number.is_nan() {
            assert_eq!((half, brain), (f16::NAN.to_bits(), bf16::NAN.to_bits()));
        } else {
            assert_eq!(half, f16::from_f32_const(number).to_bits(), "{number:e}");
            assert_eq!(brain, bf16::from_f32_const(number).to_bits(), "{number:e}");
        }
        #[cfg(target_arch = "x86_64")]
        if Level::detect() != Level::Portable {
            assert_eq!(x86::narrow_eight(number).to_bits(), half, "{number:e}");
        }
    };
    for bits in 0..=u16::MAX {
        let middles =
            [f16::from_bits(bits).to_f32().to_bits() + 0x1000, u32::from(bits) << 16 | 0x8000];
        for middle in middles {
            for offset in [-0x1000, -1, 0, 1, 0xfff] {
                narrow(f32::from_bits(middle.wrapping_add_signed(offset)));
            }
        }
        // Middles between subnormal halves are not a fixed distance in bits away.
        narrow((f32::from(bits) + 0.5) * 2f32.powi(-25));
    }
}

#[test]
fn halves_are_rounded_once() {
    // In f16 itself 2048 + 1 is 2048 again, four times.
    let ones = f16::ONE.to_ne_bytes().to_vec();
    let srcs = [
        f16::from_f32(2048.0).to_ne_bytes().to_vec(),
        ones.clone(),
        ones.clone(),
        ones.clone(),
        ones,
    ];
    for level in levels() {
        let result = run(level, DType::F16, &Steps::combine(ReduceOp::Sum), &srcs, 0, 1);
        assert_eq!(result[0], f16::from_f32(2052.0).to_ne_bytes());
    }
}

#[test]
fn in_place_steps_equal_the_whole() {
    // Where nothing is rounded between the steps: halves, for one, would be.
    for dtype in DType::ALL.into_iter().filter(|dtype| !matches!(dtype, DType::F16 | DType::Bf16)) {
        for op in ReduceOp::ALL {
            for (pre, post) in SCALES {
                let whole = Steps::whole(Reduction { op, prescale: pre, postscale: post }, 3);
                let srcs = sources(dtype, 3, 200);
                let mut inputs: Vec<_> = srcs.iter().map(|src| Memory::new(dtype, src)).collect();
                let mut output = Memory::new(dtype, &srcs[0]);
                let pointers: Vec<_> =
                    inputs.iter_mut().map(|input| input.pointer().cast_const()).collect();
                // SAFETY: every pointer is valid for 200 elements.
                unsafe {
                    for pointer in &pointers {
                        prescale(dtype, pre, pointer.cast_mut(), 200);
                    }
                    reduce(dtype, &Steps::combine(op), &pointers, &[output.pointer()], 200);
                    finish(dtype, &whole, output.pointer(), 200);
                }
                assert_eq!(
                    output.bytes_mut(),
                    reference(dtype, &whole, &srcs),
                    "{dtype:?} {whole:?}"
                );
            }
        }
    }
}

#[test]
fn any_byte_becomes_a_bool() {
    let mut bytes: Vec<u8> = (0..=255).chain(0..100).collect();
    // SAFETY: the vector's own memory.
    unsafe { canonical_bool(bytes.as_mut_ptr(), bytes.len()) };
    let expected: Vec<u8> = (0..=255).chain(0..100).map(|byte: u8| byte.min(1)).collect();
    assert_eq!(bytes, expected);
}

#[test]
fn nothing_to_do_touches_nothing() {
    let dangling = std::ptr::without_provenance_mut(64);
    for dtype in DType::ALL {
        // SAFETY: no element is read or written.
        unsafe {
            reduce(dtype, &Steps::combine(ReduceOp::Sum), &[dangling], &[dangling], 0);
            prescale(dtype, 2.0, dangling, 0);
            prescale(dtype, 1.0, dangling, 1000);
            finish(dtype, &Steps::combine(ReduceOp::Sum), dangling, 1000);
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_equal_the_reference(
        dtype in proptest::sample::select(&DType::ALL[..]),
        op in proptest::sample::select(&ReduceOp::ALL[..]),
        count in 1..9usize,
        len in 0..300usize,
        seed: u64,
        prescale in prop_oneof![Just(1.0), any::<f64>(), -2.0..2.0],
        postscale in prop_oneof![Just(1.0), any::<f64>(), -2.0..2.0],
    ) {
        let steps = Steps::whole(Reduction { op, prescale, postscale }, count);
        let source = |i| noise(seed.wrapping_add(i), len * dtype.size());
        let srcs: Vec<_> = (0..count as u64).map(source).collect();
        check(dtype, &steps, &srcs, count / 2, 1);
    }
}

#[test]
fn copies_line_by_line_are_copies() {
    let source: Vec<u8> = (0..20_000).map(|index| (index * 7 % 251) as u8).collect();
    let places = [(0, 0, 8192), (3, 0, 8192), (0, 5, 8193), (7, 63, 9999), (1, 1, 100), (0, 9, 3)];
    for (from, to, bytes) in places {
        let check = |copy: &dyn Fn(*const u8, *mut u8)| {
            let mut target = vec![0u8; 20_000];
            copy(source[from..].as_ptr(), target[to..].as_mut_ptr());
            assert_eq!(target[to..to + bytes], source[from..from + bytes]);
            assert!(target[..to].iter().chain(&target[to + bytes..]).all(|byte| *byte == 0));
        };
        // SAFETY: both hold as many bytes, and are different memory.
        unsafe {
            check(&|from, to| hand_over(from, to, bytes));
            check(&|from, to| take_over(from, to, bytes));
            check(&|from, to| take_far(from, to, bytes));
        }
    }
}
