"""Folders as public sets have them, from their descriptions, and ordinary ones: what is read, and where several
readings are shown, whether one of the printed specifications reads the set as its authors mean it."""

import itertools
import re
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from vitmods.data.sources import open_source
from vitmods.util.errors import UserError

from ..support import encoded, noise, write_files


def expanded(pattern):
    """a/{b,c}/{0-2}.png -> a/b/0.png, ..., a/c/2.png; {001-003} keeps the zeros"""

    def choices(part):
        if match := re.fullmatch(r"(\d+)-(\d+)", part):
            first, last = match.groups()
            return [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
        return part.split(",")

    parts = re.split(r"\{(.*?)\}", pattern)
    return ["".join(words) for words in itertools.product(*(choices(p) if i % 2 else [p] for i, p in enumerate(parts)))]


SHADES = np.repeat(np.arange(4, dtype=np.uint8), 36).reshape(12, 12)


def draw(root, patterns):
    """Draw a picture for each name; those of masks have few colors; files that are no pictures are empty. A pattern
    after = repeats the bytes of the pictures of the pattern before it."""
    for pattern in patterns.split():
        names, *copied = map(expanded, pattern.split("="))
        for i, name in enumerate(names):
            name = name.replace("~", " ")
            if copied:
                content = (root / copied[0][i]).read_bytes()
            elif not re.search(r"\.(png|jpe?g|tif|pgm|gif)$", name, re.IGNORECASE):
                content = b""
            elif name.endswith("_mask.png") or "/masks/" in name or "mask_1" in name:
                content = encoded(Image.fromarray(SHADES))
            else:
                content = encoded(noise(int.from_bytes(name.encode()) % 2**32))
            write_files(root, {name: content})


def table(columns, names, *values):
    """A line for each name by the pattern, with the values in turn."""
    rows = [",".join(row) for row in zip(expanded(names), itertools.cycle(values))] if values else expanded(names)
    return "\n".join([columns, *rows]) + "\n"


def found(source):
    """Classes -> and the numbers of images of splits, such as "cat dog: train 4, test 2"; "-" without classes"""
    classes = "-" if source.target == "none" else " ".join(sorted(source.classes))
    return f"{classes}: " + ", ".join(f"{split} {len(part)}" for split, part in sorted(source.splits.items()))


# name: files, what is meant, how it is said ("": it is read as it is; or the option that must be printed), tables
PUBLIC = {
    "Cat and dog (Kaggle)": ("{training_set/training_set,test_set/test_set}/{cats,dogs}/{0-2}.jpg",
        "cats dogs: test 6, train 6"),
    "Intel scenes": ("{seg_train/seg_train,seg_test/seg_test}/{sea,street}/{0-2}.jpg seg_pred/seg_pred/{0-4}.jpg",
        "sea street: test 6, train 6"),
    "HAM10000": ("HAM_part_1/ISIC_{0100-0109}.jpg HAM_part_2/ISIC_{0110-0119}.jpg", "mel nv: train 20",
        "?labels=HAM10000_metadata.csv&file=image_id&label=dx",
        {"HAM10000_metadata.csv": table("image_id,dx,sex", "ISIC_{0100-0119}", "mel,f", "nv,m", "mel,m")}),
    "Horse or human": ("{horse-or-human,validation-horse-or-human}/{horses,humans}/{0-2}.png",
        "horses humans: train 6, val 6", "?splits=validation-horse-or-human:val,horse-or-human:train"),
    "Rock paper scissors (Moroney)": ("{rps,rps-test-set}/{rock,paper,scissors}/{0-2}.png",
        "paper rock scissors: test 9, train 9", "?splits=rps-test-set:test,rps:train"),
    "Rock paper scissors (Kaggle)": (
        "{rock,paper,scissors}/{0-2}.png rps-cv-images/{rock,paper,scissors}/{0-2}.png={rock,paper,scissors}/{0-2}.png",
        "paper rock scissors: train 9"),
    "Flowers recognition": ("{daisy,rose,tulip}/{0-2}.jpg flowers/{daisy,rose,tulip}/{0-3}.jpg",
        "daisy rose tulip: train 12", "?splits=flowers:train"),
    "Chest X-ray pneumonia": ("{train,val,test}/{NORMAL,PNEUMONIA}/{0-2}.jpeg "
        "chest_xray/{train,val,test}/{NORMAL,PNEUMONIA}/{0-2}.jpeg={train,val,test}/{NORMAL,PNEUMONIA}/{0-2}.jpeg",
        "NORMAL PNEUMONIA: test 6, train 6, val 6"),
    "Brain MRI yes/no": ("{yes,no}/{0-2}.jpg brain_tumor_dataset/{yes,no}/{0-2}.jpg={yes,no}/{0-2}.jpg",
        "no yes: train 6"),
    "Brain tumor MRI": ("{Training,Testing}/{glioma,pituitary}/{0-2}.jpg", "glioma pituitary: test 6, train 6"),
    "APTOS 2019": ("train_images/a{0-9}.png test_images/b{0-3}.png", "0 2: train 10",
        "?labels=train.csv&file=id_code&label=diagnosis",
        {"train.csv": table("id_code,diagnosis", "a{0-9}", "0", "2"), "test.csv": "id_code\nb0\nb1\n"}),
    "Dog breeds": ("train/a{0-9}.jpg test/b{0-9}.jpg", "boxer collie: train 10", "",
        {"labels.csv": table("id,breed", "a{0-9}", "boxer", "collie")}),
    "GTSRB": ("Train/{0-2}/{00-03}.png Test/{00-03}.png Meta/{0-2}.png", "0 1 2: train 12", "",
        {"Train.csv": table("Path,ClassId", "Train/{0-2}/{00-03}.png", *"000011112222"),
         "Test.csv": table("Path,ClassId", "Test/{00-03}.png", "0", "1")}),
    "Tiny ImageNet": ("train/{n01,n02}/images/{0-3}.JPEG {val,test}/images/v{0-3}.JPEG", "n01 n02: train 8", "",
        {"wnids.txt": "n01\nn02\n", "words.txt": "n01\tfish\nn02\tshark\n"}),
    "CUB-200-2011": ("images/{001.Albatross,002.Auklet}/{0-3}.jpg attributes/a.txt",
        "001.Albatross 002.Auklet: train 8", "/images", {"images.txt": "1 001.Albatross/0.jpg\n"}),
    "Caltech 101": ("101_ObjectCategories/{ant,barrel}/image_{0001-0004}.jpg", "ant barrel: train 8",
        "/101_ObjectCategories"),
    "Stanford dogs": ("Images/{n02-Chihuahua,n03-Pug}/n_{0-3}.jpg Annotation/{n02-Chihuahua,n03-Pug}/n_{0-3}",
        "n02-Chihuahua n03-Pug: train 8", "/Images"),
    "EuroSAT": ("2750/{Forest,River}/{1-4}.jpg", "Forest River: train 8", "/2750"),
    "UC Merced": ("UCMerced_LandUse/Images/{beach,forest}/{1-4}.tif readme.txt", "beach forest: train 8",
        "/UCMerced_LandUse/Images"),
    "PlantVillage": ("{color,grayscale,segmented}/{Apple,Corn}/{0-2}.jpg", "Apple Corn: train 6",
        "?splits=color:train"),
    "Office-31": ("{amazon,dslr,webcam}/images/{bike,mug}/{0-2}.jpg", "bike mug: train 6",
        "?splits=amazon/images:train"),
    "PACS": ("{art_painting,cartoon,photo,sketch}/{dog,guitar}/{0-2}.jpg", "dog guitar: train 24",
        "?splits=art_painting:train,cartoon:train,photo:train,sketch:train"),
    "COVID-19 radiography": ("{COVID,Normal,Viral}/{images,masks}/{0-2}.png", "COVID Normal Viral: train 9",
        "?splits=*/images:train"),
    "BUSI": ("{benign,malignant}/{1-4}.png {benign,malignant}/{1-4}_mask.png benign/1_mask_1.png",
        "benign malignant: train 8"),
    "State Farm": ("imgs/train/{c0,c1,c2}/img_{0-3}.jpg imgs/test/img_{4-6}.jpg", "c0 c1 c2: train 12", "/imgs",
        {"driver_imgs_list.csv": "subject,classname,img\np1,c0,img_0.jpg\n"}),
    "NIH ChestX-ray14": ("images_001/images/{000-009}.png images_002/images/{010-019}.png",
        "Edema Mass No Finding: train 20", "?labels=Data_Entry_2017.csv&file=Image Index&label=Finding Labels",
        {"Data_Entry_2017.csv": table("Image Index,Finding Labels,Patient Gender", "{000-019}.png",
                                       "Mass|Edema,M", "Edema,F", "No Finding,F")}),
    "CelebA": ("img_align_celeba/img_align_celeba/{000-009}.jpg", "Bald Smiling: train 10",
        "?labels=list_attr_celeba.csv&file=image_id",
        {"list_attr_celeba.csv": table("image_id,Bald,Smiling", "{000-009}.jpg", "1,-1", "-1,1", "1,1"),
         "list_eval_partition.csv": table("image_id,partition", "{000-009}.jpg", "0", "1", "2")}),
    "Cassava": ("train_images/{0-9}.jpg test_images/x.jpg", "0 3: train 10",
        "?labels=train.csv&file=image_id&label=label",
        {"train.csv": table("image_id,label", "{0-9}.jpg", "0", "3"),
         "sample_submission.csv": "image_id,label\nx.jpg,4\n"}),
    "Plant pathology 2020": ("images/Train_{0-9}.jpg images/Test_{0-9}.jpg", "healthy rust scab: train 10",
        "?labels=train.csv&file=image_id",
        {"train.csv": table("image_id,healthy,rust,scab", "Train_{0-9}", "1,0,0", "0,1,0", "0,0,1"),
         "test.csv": table("image_id", "Test_{0-9}")}),
    "SUN397": ("a/{abbey,alley}/{0-2}.jpg b/{bakery,barn}/{0-2}.jpg", "abbey alley bakery barn: train 12",
        "?splits=a:train,b:train"),
    "iNaturalist mini": ("{train_mini,val}/{00000_Animalia,00001_Plantae}/{0-2}.jpg",
        "00000_Animalia 00001_Plantae: train 6, val 6"),
    "Imagewoof": ("{train,val}/{n02,n03}/{0-3}.JPEG", "n02 n03: train 8, val 8", "",
        {"noisy_imagewoof.csv": table("path,label,is_valid", "train/{n02,n03}/{0-3}.JPEG",
                                      *["n02,False"] * 4, *["n03,False"] * 4)}),
    "Fruits-360": ("{Training,Test}/{Apple,Pear}/{0-2}_100.jpg test-multiple_fruits/{0-2}.jpg",
        "Apple Pear: test 6, train 6"),
    "Blood cells": ("{TRAIN,TEST,TEST_SIMPLE}/{EOSINOPHIL,MONOCYTE}/{0-2}.jpeg", "EOSINOPHIL MONOCYTE: test 6, train 6",
        "?splits=TEST:test,TRAIN:train"),
    "Waste classification": ("DATASET/{TRAIN,TEST}/{O,R}/{0-2}.jpg", "O R: test 6, train 6", "/DATASET"),
    "ASL alphabet": (
        "asl_alphabet_train/asl_alphabet_train/{A,B}/{0-2}.jpg asl_alphabet_test/asl_alphabet_test/{A,B}_test.jpg",
        "A B: train 6"),
    "New plant diseases": ("{train,valid}/{Apple,Corn}/{0-2}.JPG test/test/{A,B}1.JPG", "Apple Corn: train 6, val 6"),
    "Malaria cells": ("{Parasitized,Uninfected}/{0-2}.png Parasitized/Thumbs.db "
        "cell_images/{Parasitized,Uninfected}/{0-2}.png={Parasitized,Uninfected}/{0-2}.png",
        "Parasitized Uninfected: train 6"),
    "PatchCamelyon": ("train/a{0-9}.tif test/b{0-3}.tif", "0 1: train 10",
        "?labels=train_labels.csv&file=id&label=label",
        {"train_labels.csv": table("id,label", "a{0-9}", "0", "1"),
         "sample_submission.csv": table("id,label", "b{0-3}", "0")}),
    "SVHN as folders": ("{train,test,extra}/{1,2}/{0-2}.png", "1 2: test 6, train 12",
        "?splits=test:test,train:train,extra:train"),
    "Monkeys": ("training/training/{n0,n1}/n{0-3}.jpg validation/validation/{n0,n1}/n{4-6}.jpg",
        "n0 n1: train 8, val 6", "",
        {"monkey_labels.txt": "Label, Latin Name , Common Name\nn0 , alouatta_palliata , mantled_howler\n"}),
    "Vehicles with a sample": ("Dataset/{train,test}/{Bus,Car}/{0-3}.jpg sample/x.png", "Bus Car: test 8, train 8",
        "/Dataset"),
    "Casting": ("a/a/{train,test}/{def_front,ok_front}/c{0-3}.jpeg b/b/{def_front,ok_front}/c{0-3}.jpeg",
        "def_front ok_front: test 8, train 8", "/a/a"),
    "SIIM melanoma": ("jpeg/train/I_{0-9}.jpg jpeg/test/I_{10-13}.jpg", "0 1: train 10",
        "?labels=train.csv&file=image_name&label=target&group=patient_id",
        {"train.csv": table("image_name,patient_id,diagnosis,target", "I_{0-9}", "IP_1,nevus,0",
                            "IP_2,none,0", "IP_3,mel,1")}),
    "Roboflow, tables in splits": ("{train,valid}/im_jpg.rf.{100-105}.jpg", "cat dog: train 6, val 6",
        "?labels=train/_classes.csv:train,valid/_classes.csv:val", dict.fromkeys(
            ["train/_classes.csv", "valid/_classes.csv"],
            table("filename, cat, dog", "im_jpg.rf.{100-105}.jpg", " 1, 0", " 0, 1"))),
    "a table for each split": ("pictures/{0-9}.jpg", "cat dog: test 4, train 6",
        "?labels=test.csv:test,train.csv:train",
        {"train.csv": table("id,label", "{0-5}", "cat", "dog"), "test.csv": table("id,label", "{6-9}", "cat", "dog")}),
    "ImageNet-V2 as folders": ("test/{0,1}/{0-2}.jpg", "0 1: test 6", "?splits=test:test"),
    "classes in the names of splits": ("{train_cats,train_dogs,val_cats,val_dogs}/{0-3}.jpg",
        "cats dogs: train 8, val 8", "?splits=train_*:train,val_*:val"),
    "CycleGAN": ("{trainA,trainB,testA,testB}/{0-3}.jpg", "A B: test 8, train 8", "?splits=test*:test,train*:train"),
    "splits in the classes": ("cats/cats_{train,test}/{0-3}.jpg dogs/dogs_{train,test}/{0-3}.jpg",
        "cats dogs: test 8, train 8",
        "?splits=*/cats_test:test,*/cats_train:train,*/dogs_test:test,*/dogs_train:train"),
    "splits deep in the classes": ("{cat,dog}/images/{train,test}/{0-3}.jpg", "cat dog: test 8, train 8",
        "?splits=*/images/test:test,*/images/train:train"),
    "splits in one class": ("cat/{train,test}/{0-3}.jpg dog/{0-3}.jpg", "cat dog: train 12", "?splits=none"),
    "lists beside the folder, as Food-101 has them": ("{cat,dog}/{0-4}.jpg", "cat dog: test 4, train 6",
        "?splits=../meta/train.txt:train,../meta/test.txt:test", {"../meta/classes.txt": "cat\ndog\n",
        "../meta/train.txt": "cat/0\ncat/1\ncat/2\ndog/0\ndog/1\ndog/2\n",
        "../meta/test.txt": "cat/3\ncat/4\ndog/3\ndog/4\n"}),
    "lists with a header": ("{cat,dog}/{0-1}.jpg", "cat dog: test 2, train 2",
        "?splits=train.csv:train,test.csv:test", {"train.csv": "path,label\ncat/0.jpg,cat\ndog/0.jpg,dog\n",
        "test.csv": "path,label\ncat/1.jpg,cat\ndog/1.jpg,dog\n"}),
    "lists with labels, of two divisions": ("{cat,dog}/{0-1}.jpg", "cat dog: train 2, val 2",
        "?splits=train1.txt:train,val1.txt:val", {"train1.txt": "cat/0.jpg 0\ndog/0.jpg 1\n",
        "val1.txt": "cat/1.jpg 0\ndog/1.jpg 1\n", "train2.txt": "cat/1.jpg 0\ndog/1.jpg 1\n",
        "val2.txt": "cat/0.jpg 0\ndog/0.jpg 1\n"}),
    "trainval, deeper, for some images": ("{cat,dog}/{0-4}.jpg", "cat dog: test 2, train 4",
        "?splits=meta/lists/trainval.txt:train,meta/lists/test.txt:test",
        {"meta/lists/trainval.txt": "cat/0\ncat/1\ndog/0\ndog/1\n", "meta/lists/test.txt": "cat/2\ndog/2\n"}),
    "UCF101": ("{cat,dog}/v_{0-1}.jpg", "cat dog: test 2, train 2",
        "?splits=trainlist01.txt:train,testlist01.txt:test",
        {"trainlist01.txt": "cat/v_0.jpg 1\ndog/v_0.jpg 2\n", "testlist01.txt": "cat/v_1.jpg\ndog/v_1.jpg\n"}),
    "FGVC aircraft": ("images/100{0-7}.jpg", "707-320 A 310: test 4, train 4",
        "?labels=images_variant_test.txt:test,images_variant_train.txt:train",
        {"images_variant_train.txt": "1000 707-320\n1001 707-320\n1002 A 310\n1003 A 310\n",
         "images_variant_test.txt": "1004 A 310\n1005 A 310\n1006 707-320\n1007 707-320\n"}),
    "domains in splits": ("{train,test}/{clipart,sketch}/{cat,dog}/{0-1}.png", "cat dog: test 8, train 8",
        "?splits=train/clipart:train,train/sketch:train,test/clipart:test,test/sketch:test"),
    "images and masks in splits": ("{train,val}/{cat,dog}/{images,outlines}/{0-1}.png", "cat dog: train 4, val 4",
        "?splits=train/*/images:train,val/*/images:val"),
    "PlantVillage, doubled below a folder": ("PlantVillage/{Pepper,Potato}/{0-2}.JPG "
        "PlantVillage/PlantVillage/{Pepper,Potato}/{0-2}.JPG=PlantVillage/{Pepper,Potato}/{0-2}.JPG",
        "Pepper Potato: train 6", "/PlantVillage"),
    "a table that names two pictures a line": ("{scan,outline}/a{0-3}.png", "0 1: train 4",
        "?labels=all.csv&file=image&label=label",
        {"all.csv": table("outline,image,label", "outline/a{0-3}.png", *[f"scan/a{i}.png,{i % 2}" for i in range(4)])}),
    "a small table beside folders of one numbering": ("{a,b,c,d,e,f}/{0-3}.png", "a b c d e f: train 24", "",
        {"bad.csv": "file,label\na/0.png,blurred\nb/1.png,dark\nc/2.png,blurred\nd/3.png,dark\n"}),
    "folders by day in test alone": ("train/{cat,dog}/{0-3}.png test/{cat,dog}/{day,night}/{0-1}.png",
        "cat dog: test 8, train 8", "?splits=test:test,train:train"),
    "splits in other languages": ("{entrainement,validation}/{chat,chien}/{0-2}.png", "chat chien: train 6, val 6",
        "?splits=validation:val,entrainement:train"),
    "a table of a split, whose images are called as those of another": ("{train,test}/{0000-0011}.png",
        "cat dog: train 12", "?labels=train.csv&file=id&root=train&label=label",
        {"train.csv": table("id,label", "{0000-0011}", "cat", "dog")}),
}  # fmt: skip
ORDINARY = {
    "splits in German": ("{Training,Validierung,Test}/{Hund,Katze}/{0-2}.png", "Hund Katze: test 6, train 6, val 6"),
    "splits in Spanish": ("{entrenamiento,validacion,prueba}/{gato,perro}/{0-2}.png",
        "gato perro: test 6, train 6, val 6"),
    "test results": ("{test_negative,test_positive}/{0-2}.png", "test_negative test_positive: train 6"),
    "kinds of training": ("{strength_training,cardio_training,yoga}/{0-2}.png",
        "cardio_training strength_training yoga: train 9"),
    "real and fake faces": ("{training_fake,training_real}/{0-2}.jpg", "training_fake training_real: train 6"),
    "valid and invalid": ("{valid,invalid}/{0-2}.png", "invalid valid: train 6"),
    "names in Chinese": ("{猫,狗,训练}/{0-2}.png", "狗 猫 训练: train 9"),
    "dots and blanks": ("{v1.0,U.S.A,black~cat,dog.jpg}/{0-2}.png", "U.S.A black cat dog.jpg v1.0: train 12"),
    "one image a class": ("{a1,b2,c3}/x.png", "a1 b2 c3: train 3"),
    "two classes": ("{cat,dog}/{0-2}.png", "cat dog: train 6"),
    "classes with numbers": ("{c0,c1}/{0-2}.png", "c0 c1: train 6"),
    "digits": ("{0,1,2}/{0-2}.png", "0 1 2: train 9"),
    "numbered classes": ("{class_1,class_2,class_3}/{0-2}.png", "class_1 class_2 class_3: train 9"),
    "faces of subjects": ("s{1-4}/{1-3}.pgm", "s1 s2 s3 s4: train 12"),
    "years": ("{1990s,2000s}/{0-2}.png", "1990s 2000s: train 6"),
    "splits": ("{train,val,test}/{cat,dog}/{0-2}.png", "cat dog: test 6, train 6, val 6"),
    "splits, other words": ("{Training,Validation}/{cat,dog}/{0-2}.png", "cat dog: train 6, val 6"),
    "splits, still other words": ("{training,dev,Testing}/{cat,dog}/{0-2}.png", "cat dog: test 6, train 6, val 6"),
    "splits with numbered classes": ("{train,test}/c{0-2}/{0-2}.png", "c0 c1 c2: test 9, train 9"),
    "a test split that lacks a class": ("train/{cat,dog,fox}/{0-2}.png test/{cat,dog}/{0-2}.png",
        "cat dog fox: test 6, train 9"),
    "patients in classes": ("benign/{p01,p02}/{0-2}.png malignant/{p03,p04}/{0-2}.png", "benign malignant: train 12"),
    "days in classes": ("cat/{2020-01-01,2020-01-02}/{0-1}.png dog/2021-03-04/{0-1}.png", "cat dog: train 6"),
    "some classes in folders": ("cat/{indoor,outdoor}/{0-2}.png dog/{0-2}.png fox/{0-2}.png", "cat dog fox: train 12"),
    "a class called train": ("{bus,train,tram}/{0-2}.png", "bus train tram: train 9"),
    "a class called test tube": ("{beaker,test_tube}/{0-2}.png", "beaker test_tube: train 6"),
    "train stations": ("{bus_station,train_station}/{0-2}.png", "bus_station train_station: train 6"),
    "a class called images": ("{hats,images}/{0-2}.png", "hats images: train 6"),
    "words with signs": ("{black-cat,white_dog,red.fox}/{0-2}.png", "black-cat red.fox white_dog: train 9"),
    "one name in all classes": ("{cat,dog}/img_{0-2}.jpg", "cat dog: train 6"),
    "bursts": ("{cat,dog}/{a,b}_{1-3}.png", "cat dog: train 12"),
    "copies of a camera": ("{cat,dog}/IMG_{1-3}.png {cat,dog}/IMG_{1-3}_1.png", "cat dog: train 12"),
    "a table that agrees": ("{cat,dog}/{0-2}.png", "cat dog: train 6", "",
        {"all.csv": table("path,label", "{cat,dog}/{0-2}.png", *["cat"] * 3, *["dog"] * 3)}),
    "a table of numbers of classes": ("{cat,dog}/{0-2}.png", "cat dog: train 6", "",
        {"all.csv": table("path,label", "{cat,dog}/{0-2}.png", *"000111")}),
    "a table of groups": ("{cat,dog}/{0-2}.png", "cat dog: train 6", "",
        {"groups.csv": table("image,group", "{cat,dog}/{0-2}.png", *"abab")}),
    "lists of other images": ("{cat,dog}/{0-2}.png", "cat dog: train 6", "",
        {"train.txt": "cat/7.png\ndog/7.png\n", "test.txt": "cat/8.png\n"}),
    "lists that share images": ("{cat,dog}/{0-1}.png", "cat dog: train 4", "",
        {"train.txt": "cat/0.png\ndog/0.png\ncat/1.png\n", "test.txt": "cat/0.png\ndog/1.png\n"}),
    "a table of other things": ("{cat,dog}/{0-2}.png", "cat dog: train 6", "",
        {"log.csv": "step,loss\n0,1.5\n1,1.2\n"}),
    "a table of ages": ("{cat,dog}/{0-5}.png", "cat dog: train 12", "",
        {"about.csv": table("path,age", "{cat,dog}/{0-5}.png", *"121212212121")}),
    "images alone": ("{0-5}.png", "-: train 6"),
    "images in splits": ("{train,val}/{0-5}.png", "-: train 6, val 6"),
    "images and a table without labels": ("{0-5}.png", "-: train 6", "",
        {"list.csv": table("file,bytes", "{0-5}.png", *[f"{i}.5" for i in range(6)])}),
    "grades": ("{grade0,grade1,grade2}/{0-2}.png", "grade0 grade1 grade2: train 9"),
    "good and bad": ("{good,bad}/{000-003}.png", "bad good: train 8"),
    "upper case": ("{CAT,DOG}/{0-2}.PNG", "CAT DOG: train 6"),
    "numbered classes in the order of the camera": ("class_1/{01-03}.png class_2/{04-06}.png",
        "class_1 class_2: train 6"),
    "people with and without masks": ("{with_mask,without_mask}/{0-2}.jpg", "with_mask without_mask: train 6"),
    "one class in a wrapper": ("cat/cat/{0-2}.png dog/{0-2}.png", "cat dog: train 6"),
    "a wrapper in each class": ("{cat,dog}/images/{0-2}.png", "cat dog: train 6"),
    "notes and an image beside the classes": (
        "{cat,dog}/{0-2}.png README.txt LICENSE cat/notes.txt cat/Makefile cover.png", "cat dog: train 6"),
    "what programs leave": ("{cat,dog}/{0-2}.png fox/.keep .cache/{cat,dog}/{0-2}.png .DS_Store "
        "__MACOSX/{cat,dog}/._{0-2}.png", "cat dog: train 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PUBLIC, *ORDINARY])
def test_layouts(tmp_path, name):
    files, meant, how, tables = (*(PUBLIC | ORDINARY)[name], "", {})[:4]
    root = tmp_path / "set"
    draw(root, files)
    write_files(root, tables)
    if how:
        with pytest.raises(UserError) as stopped:
            open_source(root)
        printed = re.findall(r'--data "(.*?)"|Give (\S+?)\. ', str(stopped.value))
        assert f"{root}{how}" in ["".join(pair) for pair in printed]
    source = open_source(f"{root}{how}")
    assert found(source) == meant
    for part in source.splits.values():
        of_folders = set(source.classes) <= {word for name in part.ids for word in name.split("/")}
        pairs = zip(part.ids, part.labels.tolist(), strict=True) if of_folders else ()
        assert all(source.classes[label] in name.split("/") for name, label in pairs)


CALLED_AS_A_SPLIT = {
    "{cat,dog,test}/{0-2}.png": 1, "{bus,car,unlabeled}/{0-2}.png": 1,
    "{cat,test}/{0-2}.png": 0, "{train,test}/{cat,dog,test}/{0-2}.png": 0,
}  # fmt: skip


@pytest.mark.parametrize("files", CALLED_AS_A_SPLIT)
def test_a_class_that_is_called_as_a_split_is_named(tmp_path, files):
    draw(tmp_path, files)
    notes = [text for text in open_source(tmp_path).warnings if "was read as a class" in text]
    assert len(notes) == CALLED_AS_A_SPLIT[files]


@pytest.mark.parametrize(("files", "way", "meant"), [
    ("Aves/{2801,2802}/a{0-2}.jpg Insecta/{2901,2902}/b{0-2}.jpg", "Aves:train,Insecta:train", "2801 2802 2901 2902"),
    ("tiles/tiles/{01_TUMOR,02_STROMA}/{0-5}.tif large/{0-1}.tif", "tiles/tiles:train", "01_TUMOR 02_STROMA"),
    ("train/Aves/{a1,a2}/{0-2}.png train/Rosa/{b1,b2}/{0-2}.png", "train/Aves:train,train/Rosa:train", "a1 a2 b1 b2"),
    ("{cat,dog}/{0-2}.png", "", ""),
])  # fmt: skip
def test_folders_in_class_folders_are_named_with_what_reads_them(tmp_path, files, way, meant):
    draw(tmp_path, files)
    notes = [text for text in open_source(tmp_path).warnings if "hold folders, which count as theirs" in text]
    assert len(notes) == bool(way)
    for note in notes:
        assert f'"{tmp_path}?splits={way}"' in note
        assert found(open_source(f"{tmp_path}?splits={way}")) == f"{meant}: train 12"


LINES = {  # path, label, name of another image -> line of a list
    "columns": ",Filename,Label\n{other},{path},{label}",
    "a number first": "{other} {path}",
    "numbers that are called as names": "id,path\n{other},{path}",
    "a label first": "{label}\t{path}",
    "commas in quotes": '"/my data/{path}",{label}',
    "blanks in folders": "C:\\my data\\{path} {label}",
    "a header of words": "Image Path\n{path}",
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("splits", ["train.csv:train,test.csv:test", "{root}/train.csv:train,{root}/test.csv:test"])
def test_lists_that_say_the_same(tmp_path, name, splits):
    draw(tmp_path, "cat/{0-3}.png dog/{4-7}.png")
    *header, line = LINES[name].split("\n")
    for split, numbers in (("train", "0145"), ("test", "2367")):
        rows = [line.format(path=f"{c}/{i}.png", label=c, other=7 - int(i)) for i in numbers
                for c in ["dog" if i > "3" else "cat"]]  # fmt: skip
        write_files(tmp_path, {f"{split}.csv": "\n".join([*header, *rows]) + "\n"})
    source = open_source(f"{tmp_path}?splits={splits.format(root=tmp_path)}")
    assert source.splits["train"].ids == ("cat/0.png", "cat/1.png", "dog/4.png", "dog/5.png")
    assert source.splits["test"].ids == ("cat/2.png", "cat/3.png", "dog/6.png", "dog/7.png")


@pytest.mark.parametrize(("lists", "note"), [
    ({"train.txt": "cat/0\ndog/0\n"}, 'train.txt were not used. If they are meant, write "?splits=train.txt:train"'),
    ({"train.txt": "cat/0\n", "test.txt": "cat/0\n"}, "not used: cat/0.png is in the lists of two splits"),
    ({"../train_test_split.txt": "1 1\n2 0\n", "../images.txt": "1 cat/0.png\n2 cat/1.png\n"},
     "train_test_split.txt may have the splits of these images and was not used"),
    ({"../other/train.txt": "cat/0\ndog/0\n", "../other/test.txt": "cat/1\ndog/1\n", "../other/cat/x.txt": ""}, ""),
    ({"val.txt": "cat/0\n", "test.txt": "cat/1\n"}, 'write "?splits=val.txt:val,test.txt:test"'),
    ({"train.txt": "cat/0\ncat/1\ndog/0\ndog/1\n", "README.txt": "cat/0\n"}, ""),
    ({"train.txt": "torch\n", "test.txt": "pytest\n"}, ""),
])  # fmt: skip
def test_lists_that_are_not_used_are_named(tmp_path, lists, note):
    root = tmp_path / "images"
    draw(root, "{cat,dog}/{0-1}.png")
    write_files(root, lists)
    source = open_source(root)
    assert found(source) == "cat dog: train 4"
    assert len(source.warnings) == bool(note)
    assert note in "".join(source.warnings)


def test_lists_of_folders_that_can_be_read_in_several_ways(tmp_path):
    draw(tmp_path, "a/{abbey,arch}/a{0-1}.jpg b/bar/b{0-1}.jpg")
    write_files(tmp_path, {"Training_01.txt": "/a/abbey/a0.jpg\n/a/arch/a0.jpg\n/b/bar/b0.jpg\n",
                           "Testing_01.txt": "/a/abbey/a1.jpg\n/a/arch/a1.jpg\n/b/bar/b1.jpg\n"})  # fmt: skip
    lists = "Training_01.txt:train,Testing_01.txt:test"
    with pytest.raises(UserError) as stopped:
        open_source(f"{tmp_path}?splits={lists}")
    assert f'"{tmp_path}?splits=a:train,b:train,{lists}"' in str(stopped.value)
    assert found(open_source(f"{tmp_path}?splits=a:train,b:train,{lists}")) == "abbey arch bar: test 3, train 3"
    assert found(open_source(f"{tmp_path}?splits=.:train,{lists}")) == "a b: test 3, train 3"
    assert f"?splits=a:train,b:train,{lists}" in "".join(open_source(f"{tmp_path}?splits=a:train,b:train").warnings)


def test_lists_name_images_with_spaces_and_labels(tmp_path):
    write_files(tmp_path, [f"{kind}/{name}.jpg" for kind in ("hot dog", "ice cream") for name in ("a b", "c d")])
    write_files(tmp_path, {"train.txt": "hot dog/a b.jpg 0\nice cream/a b.jpg 1\n",
                           "test.txt": "hot dog/c d\nice cream/c d\n"})  # fmt: skip
    with pytest.raises(UserError, match="has lists of its splits"):
        open_source(tmp_path)
    assert (
        found(open_source(f"{tmp_path}?splits=train.txt:train,test.txt:test")) == "hot dog ice cream: test 2, train 2"
    )


@pytest.mark.parametrize(("test", "words"), [
    ("cat/0.png\n", "cat/0.png is in the lists of two splits"),
    ("cat/1.png\nfox/9.png\n", "Line 2 of .*test.txt names fox/9.png, which .* does not have"),
    ("cat/1.png\n", ""),
    ("", "test.txt does not name any image"),
    ("cat/1 copy.png\ndog/1.png\n", "Line 1 of .*test.txt names cat/1 copy.png, which"),
    ("dog/1.png,dog\ncat/1.png,dog\n", r"Line 2 of .* says dog of cat/1.png, .*\?labels=train.txt:train,test.txt:test"),
    ("cat/1.png,test\ndog/1.png,train\n", r"Line 2 of .* says train of dog/1.png, .* --split-file .*test.txt"),
    ("cat/1.png|dog/1.png\n", "names different images in its columns"),
])  # fmt: skip
def test_lists_of_splits_that_do_not_fit_the_images(tmp_path, test, words):
    draw(tmp_path / "flat", "{0-3}.png")
    write_files(tmp_path / "flat", {"train.txt": "0.png\n"})
    with pytest.raises(UserError, match=r"does not have class folders.*flat\?labels=train.txt:train"):
        open_source(f"{tmp_path / 'flat'}?splits=train.txt:train")
    tmp_path = tmp_path / "set"
    draw(tmp_path, "{cat,dog}/{0-1}.png")
    write_files(tmp_path, {"train.txt": "cat/0.png\ndog/0.png\ncat/0.png\n", "test.txt": test})
    with pytest.raises(UserError, match=words) if words else nullcontext():
        assert open_source(f"{tmp_path}?splits=train.txt:train,test.txt:test").warnings == [
            "1 images that no list of a split names were left out.",
            "1 lines that repeat another were left out.",
        ]
    with pytest.raises(UserError, match=r"train\.txt is named twice"):
        open_source(f"{tmp_path}?splits=train.txt:train,train.txt:test")


@pytest.mark.parametrize(("files", "tables", "words"), [
    ("images/{0-3}.jpg", {"all.csv": "id,label,title\n0,hat,blue\n1,hat,blue, big\n"}, "Line 3 of .*all.csv has"),
    ("a.csv", {"a.csv": "emotion,pixels\n0,1 2 3\n1,4 5 6\n0,7 8 9\n"}, "^No images in class folders"),
    ("{0-3}.jpg", {"list.txt": "0.jpg cat\n"}, 'list.txt is a file. If .* write ".*[?]labels=list.txt"'),
])  # fmt: skip
def test_what_is_said_of_tables_that_say_nothing(tmp_path, files, tables, words):
    draw(tmp_path, files)
    write_files(tmp_path, tables)
    with pytest.raises(UserError, match=words):
        open_source(tmp_path / "list.txt" if "list.txt" in tables else tmp_path)
